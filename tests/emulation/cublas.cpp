/*
 * Matrix products in plain loops. Column-major, as BLAS has it.
 */
#include "cublas_v2.h"

#include <algorithm>

#include "capture.h"
#include "compression/numerics.h"
#include "device.h"
#include "memory.h"

struct cublasContext {
  cudaStream_t stream;
};

namespace emulation {

namespace {

struct matrix {
  char *values;
  cudaDataType type;
  bool transposed;
  size_t leading, stride; /* elements from column to column, and from matrix to matrix */

  size_t width() const { return type == CUDA_R_32F ? 4 : 2; }
  onebit_dtype_t dtype() const { return type == CUDA_R_32F ? ONEBIT_FLOAT32 : ONEBIT_BFLOAT16; }
  size_t place(size_t row, size_t column) const {
    return transposed ? column + row * leading : row + column * leading;
  }
  float load(size_t row, size_t column) const {
    return ob_load(values, place(row, column), dtype());
  }
  matrix number(size_t i) const {
    matrix one = *this;
    one.values += i * stride * width();
    return one;
  }
  /* Whether `count` matrices of these many rows and columns lie in memory of a device. */
  bool is_there(size_t rows, size_t columns, size_t count) const {
    size_t last = (count - 1) * stride + place(rows - 1, columns - 1);
    return device_can_touch(values, (last + 1) * width());
  }
};

struct product {
  matrix a, b, c;
  size_t m, n, k, batch;
  float alpha, beta;
};

/* a's columns are converted once, for the inner loop to run along them. */
void multiply(const product &all, size_t number) {
  matrix a = all.a.number(number), b = all.b.number(number), c = all.c.number(number);
  std::vector<float> columns(all.m * all.k), sums(all.m);
  for (size_t p = 0; p < all.k; p++)
    for (size_t i = 0; i < all.m; i++)
      columns[p * all.m + i] = a.load(i, p);
  for (size_t j = 0; j < all.n; j++) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (size_t p = 0; p < all.k; p++) {
      float factor = b.load(p, j);
      for (size_t i = 0; i < all.m; i++)
        sums[i] += columns[p * all.m + i] * factor;
    }
    for (size_t i = 0; i < all.m; i++) {
      float old = all.beta == 0 ? 0 : all.beta * c.load(i, j);
      ob_store(c.values, c.place(i, j), c.dtype(), all.alpha * sums[i] + old);
    }
  }
}

bool is_supported(const product &all, cublasComputeType_t compute) {
  auto known = [](const matrix &one) { return one.type == CUDA_R_32F || one.type == CUDA_R_16BF; };
  return compute >= CUBLAS_COMPUTE_32F && compute <= CUBLAS_COMPUTE_32F_FAST_TF32 && known(all.a) &&
         known(all.c) && all.a.type == all.b.type &&
         !(all.a.type == CUDA_R_32F && all.c.type == CUDA_R_16BF);
}

bool leads(const matrix &one, size_t rows, size_t columns) {
  return one.leading >= std::max<size_t>(1, one.transposed ? columns : rows);
}

cublasStatus_t enqueue_product(cublasHandle_t handle, const product &all) {
  if (!leads(all.a, all.m, all.k) || !leads(all.b, all.k, all.n) || !leads(all.c, all.m, all.n))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (!all.m || !all.n || !all.batch)
    return CUBLAS_STATUS_SUCCESS;
  lock held(guard());
  bool inputs = !all.k || (all.a.is_there(all.m, all.k, all.batch) &&
                           all.b.is_there(all.k, all.n, all.batch));
  if (!inputs || !all.c.is_there(all.m, all.n, all.batch))
    return CUBLAS_STATUS_INVALID_VALUE;
  stream_ptr stream = find_stream(handle->stream);
  if (!stream || submit(held, stream, plain([all] {
                          count(counted::kernels);
                          for (size_t i = 0; i < all.batch; i++)
                            multiply(all, i);
                        })))
    return CUBLAS_STATUS_EXECUTION_FAILED;
  return CUBLAS_STATUS_SUCCESS;
}

matrix matrix_of(const void *values, cudaDataType type, cublasOperation_t operation, int leading,
                 long long stride) {
  return {static_cast<char *>(const_cast<void *>(values)), type, operation != CUBLAS_OP_N,
          static_cast<size_t>(leading), static_cast<size_t>(stride)};
}

} // namespace

} // namespace emulation

using namespace emulation;

cublasStatus_t cublasCreate(cublasHandle_t *handle) {
  *handle = new cublasContext{nullptr};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t streamId) {
  if (!handle)
    return CUBLAS_STATUS_NOT_INITIALIZED;
  handle->stream = streamId;
  return CUBLAS_STATUS_SUCCESS;
}

/* All modes compute alike here. */
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t) {
  return handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}

const char *cublasGetStatusString(cublasStatus_t status) {
  switch (status) {
  case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
  case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
  case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
  case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
  case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
  default: return "unknown status";
  }
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa,
                            cublasOperation_t transb, int m, int n, int k, const void *alpha,
                            const void *A, cudaDataType Atype, int lda, const void *B,
                            cudaDataType Btype, int ldb, const void *beta, void *C,
                            cudaDataType Ctype, int ldc, cublasComputeType_t computeType,
                            cublasGemmAlgo_t algo) {
  return cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, 0, B,
                                    Btype, ldb, 0, beta, C, Ctype, ldc, 0, 1, computeType, algo);
}

cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
    const void *alpha, const void *A, cudaDataType Atype, int lda, long long int strideA,
    const void *B, cudaDataType Btype, int ldb, long long int strideB, const void *beta, void *C,
    cudaDataType Ctype, int ldc, long long int strideC, int batchCount,
    cublasComputeType_t computeType, cublasGemmAlgo_t) {
  if (!handle)
    return CUBLAS_STATUS_NOT_INITIALIZED;
  if (m < 0 || n < 0 || k < 0 || lda < 1 || ldb < 1 || ldc < 1 || batchCount < 0 || !alpha || !beta)
    return CUBLAS_STATUS_INVALID_VALUE;
  product all = {matrix_of(A, Atype, transa, lda, strideA),
                 matrix_of(B, Btype, transb, ldb, strideB),
                 matrix_of(C, Ctype, CUBLAS_OP_N, ldc, strideC),
                 static_cast<size_t>(m),
                 static_cast<size_t>(n),
                 static_cast<size_t>(k),
                 static_cast<size_t>(batchCount),
                 *static_cast<const float *>(alpha),
                 *static_cast<const float *>(beta)};
  return is_supported(all, computeType) ? enqueue_product(handle, all)
                                        : CUBLAS_STATUS_NOT_SUPPORTED;
}
