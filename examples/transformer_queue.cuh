/*
 * A stream of a CUDA device, for transformer_cuda.cu: kernels, matrix products and copies are put
 * on it, and the first error of any is kept, so that no call site has to look.
 */
#ifndef EXAMPLES_TRANSFORMER_QUEUE_CUH
#define EXAMPLES_TRANSFORMER_QUEUE_CUH

#include <cublas_v2.h>
#include <vector>

#include "examples/transformer_kernels.cuh"

namespace on_device {

/* A row-major matrix that a product reads, or its transpose. */
template <typename Number> struct matrix {
  const Number *data;
  cublasOperation_t operation;
};
template <typename Number> matrix<Number> stored(const Number *data) { return {data, CUBLAS_OP_N}; }
template <typename Number> matrix<Number> transposed(const Number *data) {
  return {data, CUBLAS_OP_T};
}

inline cudaDataType_t type_of(const float *) { return CUDA_R_32F; }
inline cudaDataType_t type_of(const bfloat16 *) { return CUDA_R_16BF; }

enum product_mode { REPLACE, ADD };

class queue {
public:
  queue() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check(cublasCreate(&cublas));
    if (!error_)
      check(cublasSetStream(cublas, stream_));
  }
  ~queue() {
    for (void *allocation : allocations)
      cudaFree(allocation);
    if (cublas)
      cublasDestroy(cublas);
    if (stream_)
      cudaStreamDestroy(stream_);
  }
  queue(const queue &) = delete;
  queue &operator=(const queue &) = delete;

  cudaStream_t stream() const { return stream_; }
  const char *error() const { return error_; }

  /* Zeros, for as long as the queue lives; NULL after an error. */
  template <typename T> T *allocate(size_t count) {
    void *memory = nullptr;
    if (!error_)
      check(cudaMalloc(&memory, count * sizeof(T)));
    if (error_)
      return nullptr;
    allocations.push_back(memory);
    check(cudaMemsetAsync(memory, 0, count * sizeof(T), stream_));
    return static_cast<T *>(memory);
  }

  void clear(float *x, size_t count) {
    check(cudaMemsetAsync(x, 0, count * sizeof(float), stream_));
  }
  /* On the device. */
  void copy(float *to, const float *from, size_t count) {
    check(cudaMemcpyAsync(to, from, count * sizeof(float), cudaMemcpyDeviceToDevice, stream_));
  }
  /* From or to the host: returns when this and all before it is done. */
  template <typename T> void transfer(T *to, const T *from, size_t count, cudaMemcpyKind kind) {
    check(cudaMemcpyAsync(to, from, count * sizeof(T), kind, stream_));
    check(cudaStreamSynchronize(stream_));
  }

  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), dim3 blocks, Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = dim3(THREADS);
    config.stream = stream_;
    check(cudaLaunchKernelEx(&config, kernel, arguments...));
  }
  static unsigned blocks(size_t threads) { return (unsigned)((threads + THREADS - 1) / THREADS); }
  template <typename... Parameters, typename... Arguments>
  void launch_elements(void (*kernel)(Parameters...), size_t count, Arguments... arguments) {
    launch(kernel, dim3(blocks(count)), arguments...);
  }
  template <typename... Parameters, typename... Arguments>
  void launch_rows(void (*kernel)(Parameters...), size_t rows, Arguments... arguments) {
    launch(kernel, dim3(blocks(rows * WARP)), arguments...);
  }

  /* c = a b, or c += a b, with no gaps between rows. To cuBLAS, whose matrices are column-major,
   * each of ours is its transpose: c' = b' a'. Sums are in float. */
  template <typename Result, typename Number>
  void multiply(Result *c, matrix<Number> a, matrix<Number> b, size_t rows, size_t inner,
                size_t columns, product_mode mode = REPLACE) {
    const float one = 1.0f, kept = mode == ADD ? 1.0f : 0.0f;
    check(cublasGemmEx(cublas, b.operation, a.operation, (int)columns, (int)rows, (int)inner, &one,
                       b.data, type_of(b.data), stride(b, inner, columns), a.data, type_of(a.data),
                       stride(a, rows, inner), &kept, c, type_of(c), (int)columns,
                       CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  }

  /* The same for `count` matrices of each kind, one behind the other. */
  template <typename Result, typename Number>
  void multiply_each(Result *c, matrix<Number> a, matrix<Number> b, size_t rows, size_t inner,
                     size_t columns, size_t count) {
    const float one = 1.0f, none = 0.0f;
    check(cublasGemmStridedBatchedEx(
        cublas, b.operation, a.operation, (int)columns, (int)rows, (int)inner, &one, b.data,
        type_of(b.data), stride(b, inner, columns), (long long)(inner * columns), a.data,
        type_of(a.data), stride(a, rows, inner), (long long)(rows * inner), &none, c, type_of(c),
        (int)columns, (long long)(rows * columns), (int)count, CUBLAS_COMPUTE_32F,
        CUBLAS_GEMM_DEFAULT));
  }

private:
  cudaStream_t stream_ = nullptr;
  cublasHandle_t cublas = nullptr;
  const char *error_ = nullptr; /* the first */
  std::vector<void *> allocations;

  void check(cudaError_t status) {
    if (!error_ && status != cudaSuccess)
      error_ = cudaGetErrorString(status);
  }
  void check(cublasStatus_t status) {
    if (!error_ && status != CUBLAS_STATUS_SUCCESS)
      error_ = cublasGetStatusString(status);
  }

  /* Between the rows in memory of what is rows x columns as the product sees it. */
  template <typename Number> static int stride(matrix<Number> a, size_t rows, size_t columns) {
    return (int)(a.operation == CUBLAS_OP_N ? columns : rows);
  }
};

} /* namespace on_device */

#endif
