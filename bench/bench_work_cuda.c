/* The kernels of the library, each alone, and what they work on: plans of one rank whose kernels
 * are told of more members than there are. */
#include <string.h>

#include "base/memory.h"
#include "bench/bench_copy.h"
#include "bench/bench_cuda.h"
#include "collectives/plan.h"
#include "cuda/device.h"
#include "onebit/optimizer.h"

static const struct ob_adam_factors adam_factors = {.beta1 = 0.9f,
                                                    .beta2 = 0.999f,
                                                    .one_minus_beta1 = 0.1f,
                                                    .one_minus_beta2 = 0.001f,
                                                    .momentum_factor = 1,
                                                    .variance_factor = 1,
                                                    .epsilon = 1e-8f};
#define LEARNING_RATE 1e-6f /* moves parameters little however long the benchmark runs */

/* --- The kernels, a launch a chunk */

typedef cudaError_t launch_chunk(struct bench_work *work, size_t members, size_t chunk,
                                 cudaStream_t stream);

static int each_chunk(const struct bench_put *put, const struct onebit_plan *plan,
                      launch_chunk *launch, cudaStream_t stream) {
  for (size_t chunk = 0; chunk < plan->geometry.chunks; chunk++)
    BENCH_TRY_CUDA(launch(put->context, put->members, chunk, stream));
  return BENCH_OK;
}

static const struct bench_work *work_of(const struct bench_put *put) { return put->context; }

/* A function that is a bench_put's `run` of the chunks' launches. */
#define RUN(name, plan)                                                                            \
  static int run_##name(const struct bench_put *put, cudaStream_t stream) {                        \
    return each_chunk(put, work_of(put)->plan, name, stream);                                      \
  }

/* The kernels' plan as that of a rank among so many; all of them have messages for its share. */
static struct ob_cuda_plan among(const struct onebit_plan *plan, unsigned char *incoming,
                                 size_t members) {
  struct ob_cuda_plan kernel = plan->device->kernel;
  kernel.geometry.members = members;
  kernel.geometry.incoming = incoming;
  return kernel;
}

static struct ob_cuda_pieces pieces_of(const struct bench_work *work, void *buffer) {
  return (struct ob_cuda_pieces){.base = buffer, .step = work->count * sizeof(float)};
}

static cudaError_t launch_compress(struct onebit_plan *plan, struct ob_cuda_pieces inputs,
                                   bool momentum, size_t chunk, cudaStream_t stream) {
  struct ob_cuda_source source = {.inputs = inputs,
                                  .factor = 1,
                                  .momentum = momentum,
                                  .decay = adam_factors.beta1,
                                  .weight = momentum ? adam_factors.one_minus_beta1 : 1};
  return ob_cuda_compress(plan->device->kernel, source, chunk, stream);
}

static cudaError_t compress(struct bench_work *work, size_t members, size_t chunk,
                            cudaStream_t stream) {
  (void)members;
  return launch_compress(work->bits, pieces_of(work, work->input), false, chunk, stream);
}

static cudaError_t compress_momentum(struct bench_work *work, size_t members, size_t chunk,
                                     cudaStream_t stream) {
  (void)members;
  return launch_compress(work->bits, pieces_of(work, work->input), true, chunk, stream);
}

static cudaError_t compress_half(struct bench_work *work, size_t members, size_t chunk,
                                 cudaStream_t stream) {
  (void)members;
  return launch_compress(work->half, pieces_of(work, work->half_input), false, chunk, stream);
}

static cudaError_t reduce(struct bench_work *work, size_t members, size_t chunk,
                          cudaStream_t stream) {
  return ob_cuda_reduce(among(work->bits, work->incoming, members), chunk, stream);
}

static cudaError_t sum(struct bench_work *work, size_t members, size_t chunk, cudaStream_t stream) {
  return ob_cuda_sum(among(work->bits, work->incoming, members), pieces_of(work, work->output),
                     chunk, stream);
}

static cudaError_t store(struct bench_work *work, size_t members, size_t chunk,
                         cudaStream_t stream) {
  (void)members;
  return ob_cuda_store(work->bits->device->kernel, pieces_of(work, work->output), chunk, stream);
}

static struct ob_cuda_pass pass_of(const struct bench_work *work, enum ob_pass_kind kind,
                                   float *variance) {
  return (struct ob_cuda_pass){.kind = kind,
                               .arrays = {[OB_MOMENTUM] = work->bits->worker.values[0],
                                          [OB_VARIANCE] = variance,
                                          [OB_SCRATCH] = work->bits->worker.values[1]},
                               .parameters = work->table,
                               .rate_factors = work->factors,
                               .weight_decays = work->factors + 1,
                               .learning_rate = LEARNING_RATE,
                               .factors = {.adam = adam_factors,
                                           .gradient_factor = 1,
                                           .bound = ONEBIT_STEP_BOUND,
                                           .keep_zero = true},
                               .sums = {work->block_sums}};
}

static cudaError_t apply(struct bench_work *work, size_t members, size_t chunk,
                         cudaStream_t stream) {
  (void)members;
  return ob_cuda_apply(work->bits->device->kernel, pass_of(work, OB_PASS_APPLY, work->reciprocals),
                       chunk, stream);
}

static cudaError_t load(struct bench_work *work, size_t members, size_t chunk,
                        cudaStream_t stream) {
  (void)members;
  struct ob_cuda_source source = {.inputs = pieces_of(work, work->input), .factor = 1};
  return ob_cuda_load(work->dense->device->kernel, source, chunk, stream);
}

static cudaError_t mean(struct bench_work *work, size_t members, size_t chunk,
                        cudaStream_t stream) {
  return ob_cuda_mean(among(work->dense, work->dense_incoming, members), chunk, stream);
}

static cudaError_t convert(struct bench_work *work, size_t members, size_t chunk,
                           cudaStream_t stream) {
  (void)members;
  return ob_cuda_convert(work->dense->device->kernel, pieces_of(work, work->output), chunk, stream);
}

RUN(compress, bits)
RUN(compress_momentum, bits)
RUN(compress_half, half)
RUN(reduce, bits)
RUN(sum, bits)
RUN(store, bits)
RUN(apply, bits)
RUN(load, dense)
RUN(mean, dense)
RUN(convert, dense)

static int run_adam(const struct bench_put *put, cudaStream_t stream) {
  const struct bench_work *work = work_of(put);
  BENCH_TRY_CUDA(ob_cuda_pass_over(work->bits->device->kernel,
                                   pass_of(work, OB_PASS_ADAM, work->variance), stream));
  return BENCH_OK;
}

static int run_copy_loop(const struct bench_put *put, cudaStream_t stream) {
  const struct bench_work *work = work_of(put);
  BENCH_TRY_CUDA(bench_copy_loop(work->output, work->input, work->count * sizeof(float), stream));
  return BENCH_OK;
}

static int run_memcpy(const struct bench_put *put, cudaStream_t stream) {
  const struct bench_work *work = work_of(put);
  BENCH_TRY_CUDA(cudaMemcpyAsync(work->output, work->input, work->count * sizeof(float),
                                 cudaMemcpyDeviceToDevice, stream));
  return BENCH_OK;
}

/* --- As entries. Bytes as the head comments of cuda/ have them: what is read counts once, and so
 * does what is written; a scale is 4 bytes a block. */

static struct bench_put *add(struct bench_turns *turns, struct bench_work *work, const char *name,
                             size_t members, double bytes, double scales) {
  struct bench_put *put = bench_turns_add(turns, "%s", name);
  put->context = work;
  put->members = members;
  double block = (double)work->bits->geometry.layout.block;
  put->bytes = (bytes + 4 * scales / block) * (double)work->count;
  return put;
}

void bench_add_copies(struct bench_turns *turns, struct bench_work *work) {
  struct bench_put *copy = add(turns, work, "cudaMemcpyAsync", 0, 8, 0);
  copy->run = run_memcpy;
  copy->baseline = true;
  copy = add(turns, work, "copy loop", 0, 8, 0);
  copy->run = run_copy_loop;
  copy->baseline = true;
}

struct bench_put *bench_add_compress(struct bench_turns *turns, struct bench_work *work, bool half,
                                     bool momentum) {
  struct bench_put *put = half ? add(turns, work, "compress bfloat16", 0, 2 + 8 + 1.0 / 8, 3)
                          : momentum
                              ? add(turns, work, "compress with momentum", 0, 4 + 8 + 2.0 / 8, 4)
                              : add(turns, work, "compress", 0, 4 + 8 + 1.0 / 8, 3);
  put->run = half ? run_compress_half : momentum ? run_compress_momentum : run_compress;
  return put;
}

double bench_reduce_bytes(const struct bench_work *work, size_t members) {
  double n = (double)members, block = (double)work->bits->geometry.layout.block;
  return (8 + (n + 1) / 8 + 4 * (n + 3) / block) * (double)work->count;
}

void bench_add_reduce(struct bench_turns *turns, struct bench_work *work, size_t members) {
  double n = (double)members;
  add(turns, work, "reduce", members, 8 + (n + 1) / 8, n + 3)->run = run_reduce;
}

void bench_add_sum(struct bench_turns *turns, struct bench_work *work, size_t members) {
  double n = (double)members;
  add(turns, work, "sum", members, 4 + n / 8, n)->run = run_sum;
}

void bench_add_store(struct bench_turns *turns, struct bench_work *work) {
  add(turns, work, "store", 0, 4 + 1.0 / 8, 1)->run = run_store;
}

struct bench_put *bench_add_apply(struct bench_turns *turns, struct bench_work *work) {
  struct bench_put *put = add(turns, work, "Adam apply", 0, 12 + 1.0 / 8, 1);
  put->run = run_apply;
  return put;
}

struct bench_put *bench_add_adam(struct bench_turns *turns, struct bench_work *work) {
  struct bench_put *put = add(turns, work, "fused Adam step", 0, 28, 2); /* a double a block */
  put->run = run_adam;
  return put;
}

void bench_add_dense(struct bench_turns *turns, struct bench_work *work) {
  const struct bench_options *options = work->options;
  add(turns, work, "load", 0, 8, 0)->run = run_load;
  for (size_t k = 0; k < options->stream_count; k++)
    add(turns, work, "mean", options->streams[k], 4 * (double)options->streams[k] + 4, 0)->run =
        run_mean;
  add(turns, work, "convert", 0, 8, 0)->run = run_convert;
}

double bench_local_bytes(size_t block, size_t ranks, onebit_dtype_t dtype, enum bench_local kind) {
  double n = (double)ranks, b = (double)block, element = (double)ob_dtype_size(dtype);
  double compressed = element + 8 + 1.0 / 8 + 12 / b;
  double reduced = (8 + (n + 1) / 8 + 4 * (n + 3) / b) / n;
  switch (kind) {
  case BENCH_LOCAL_EXCHANGE:
    return compressed + reduced + element + 1.0 / 8 + 4 / b;
  case BENCH_LOCAL_GATHER:
    return compressed + element + n / 8 + 4 * n / b;
  case BENCH_LOCAL_ADAM:
    return compressed + 1.0 / 8 + 4 / b + reduced + 12 + 1.0 / 8 + 4 / b;
  }
  return 0;
}

/* --- What they work on */

static onebit_status_t create_plan(struct bench_work *work, onebit_dtype_t dtype,
                                   onebit_wire_t wire, onebit_plan_t *made) {
  onebit_plan_options_t plan = ONEBIT_PLAN_OPTIONS_INIT;
  plan.device = ONEBIT_DEVICE_CUDA;
  plan.dtype = dtype;
  plan.wire = wire;
  plan.scale = work->options->scale;
  plan.block_size = work->options->block_size;
  plan.chunk_size = work->options->chunk_size;
  return onebit_plan_create(work->comm, work->count, &plan, made);
}

static int create_plans(struct bench_work *work) {
  onebit_status_t status = onebit_comm_create_self(&work->comm);
  if (status == ONEBIT_OK)
    status = create_plan(work, ONEBIT_FLOAT32, ONEBIT_WIRE_BITS, &work->bits);
  if (status == ONEBIT_OK)
    status = create_plan(work, ONEBIT_BFLOAT16, ONEBIT_WIRE_BITS, &work->half);
  if (status == ONEBIT_OK)
    status = create_plan(work, ONEBIT_FLOAT32, ONEBIT_WIRE_DENSE, &work->dense);
  return bench_status(status, "onebit_plan_create");
}

static int allocate(struct bench_work *work) {
  float **arrays[] = {&work->input, &work->parameters, &work->output, &work->variance,
                      &work->reciprocals};
  size_t members = work->most_members;
  bool well = true;
  for (size_t k = 0; k < sizeof arrays / sizeof arrays[0]; k++)
    well = (*arrays[k] = bench_device_memory(work->count, sizeof(float))) && well;
  work->half_input = bench_device_memory(work->count, 2);
  work->incoming = bench_device_memory(members, work->bits->geometry.peer_stride);
  work->dense_incoming = bench_device_memory(members, work->dense->geometry.peer_stride);
  work->table = bench_device_memory(1, sizeof *work->table);
  work->factors = bench_device_memory(2, sizeof *work->factors);
  work->block_sums = bench_device_memory(work->bits->geometry.layout.blocks, sizeof(double));
  if (well && work->half_input && work->incoming && work->dense_incoming && work->table &&
      work->factors && work->block_sums)
    return BENCH_OK;
  bench_complain("no memory on the device for the arrays of %zu elements", work->count);
  return BENCH_FAILED;
}

/* A message of random bits, or values, in each slot. */
static void fill_slots(const struct onebit_plan *plan, unsigned char *messages, uint64_t seed) {
  size_t slots =
      plan->geometry.slots < plan->geometry.chunks ? plan->geometry.slots : plan->geometry.chunks;
  uint64_t state = seed;
  for (size_t slot = 0; slot < slots; slot++) {
    struct ob_message_shape shape = ob_plan_message(plan, 0, slot);
    struct ob_view view = ob_message_view(messages + slot * plan->geometry.stride, &shape);
    view.header->scale = 0.01f;
    if (shape.dense)
      bench_fill(view.values, shape.words * OB_LANES, seed + slot);
    for (size_t k = 0; !shape.dense && !shape.one_scale && k < shape.blocks; k++)
      view.scales[k] = 0.01f / (float)(1 + k % 7);
    for (size_t k = 0; !shape.dense && k < shape.words; k++) {
      state = state * 6364136223846793005u + 1442695040888963407u; /* Knuth's, TAOCP 3.3.4 */
      view.words[k] = (uint32_t)(state >> 32);
    }
  }
}

/* The messages of so many members, and of the one that there is. Dense ones are all the same: they
 * are long, and no kernel looks at what is in them. */
static int fill_messages(const struct onebit_plan *plan, unsigned char *incoming, size_t members) {
  unsigned char *messages = ob_allocate(1, plan->geometry.peer_stride);
  const struct ob_cuda_plan *kernel = &plan->device->kernel;
  cudaError_t error = messages ? cudaSuccess : cudaErrorMemoryAllocation;
  for (size_t m = 0; m < members && error == cudaSuccess; m++) {
    if (m == 0 || !kernel->geometry.dense)
      fill_slots(plan, messages, m + 1);
    error = cudaMemcpy(incoming + m * plan->geometry.peer_stride, messages,
                       plan->geometry.peer_stride, cudaMemcpyHostToDevice);
  }
  unsigned char *own[] = {kernel->geometry.outgoing, kernel->geometry.results[0],
                          kernel->geometry.results[1]};
  for (size_t k = 0; k < 3 && error == cudaSuccess; k++)
    if (own[k])
      error = cudaMemcpy(own[k], incoming, plan->geometry.peer_stride, cudaMemcpyDeviceToDevice);
  ob_release(messages);
  return error == cudaSuccess ? BENCH_OK : bench_cuda_failed(error, "filling messages");
}

static int fill_kept(const struct ob_cuda_kept *kept, const struct bench_work *work,
                     const struct onebit_plan *plan) {
  size_t scales = plan->work.one_scale ? 1 : kept->blocks;
  for (int k = 0; k < 2; k++) {
    BENCH_TRY_CUDA(cudaMemcpy(kept->values[k], work->input, work->count * sizeof(float),
                              cudaMemcpyDeviceToDevice));
    BENCH_TRY_CUDA(cudaMemcpy(kept->scales[k], work->reciprocals, scales * sizeof(float),
                              cudaMemcpyDeviceToDevice));
  }
  return BENCH_OK;
}

/* Squares of random numbers, and numbers from 1/2 on: positive, as variances and reciprocals are.
 */
static int fill_positive(const struct bench_work *work) {
  float *values = ob_allocate(work->count, sizeof *values);
  cudaError_t error = values ? cudaSuccess : cudaErrorMemoryAllocation;
  if (values)
    bench_fill(values, work->count, 3);
  for (size_t i = 0; values && i < work->count; i++)
    values[i] *= values[i];
  if (error == cudaSuccess)
    error =
        cudaMemcpy(work->variance, values, work->count * sizeof *values, cudaMemcpyHostToDevice);
  for (size_t i = 0; values && i < work->count; i++)
    values[i] += 0.5f;
  if (error == cudaSuccess)
    error =
        cudaMemcpy(work->reciprocals, values, work->count * sizeof *values, cudaMemcpyHostToDevice);
  ob_release(values);
  return error == cudaSuccess ? BENCH_OK : bench_cuda_failed(error, "filling the variance");
}

static int fill(struct bench_work *work) {
  static const float factors[] = {1, 0};
  const struct onebit_plan *plans[] = {work->bits, work->half};
  BENCH_TRY(bench_device_fill(work->input, work->count, ONEBIT_FLOAT32, 1));
  BENCH_TRY(bench_device_fill(work->half_input, work->count, ONEBIT_BFLOAT16, 1));
  BENCH_TRY(bench_device_fill(work->parameters, work->count, ONEBIT_FLOAT32, 2));
  BENCH_TRY(fill_positive(work));
  BENCH_TRY_CUDA(
      cudaMemcpy(work->table, &work->parameters, sizeof *work->table, cudaMemcpyHostToDevice));
  BENCH_TRY_CUDA(cudaMemcpy(work->factors, factors, sizeof factors, cudaMemcpyHostToDevice));
  for (int k = 0; k < 2; k++) {
    BENCH_TRY(fill_kept(&plans[k]->device->kernel.worker, work, plans[k]));
    BENCH_TRY(fill_kept(&plans[k]->device->kernel.server, work, plans[k]));
  }
  BENCH_TRY(fill_messages(work->bits, work->incoming, work->most_members));
  return fill_messages(work->dense, work->dense_incoming, work->most_members);
}

int bench_work_create(const struct bench_options *options, size_t count, size_t members,
                      struct bench_work *work) {
  *work = (struct bench_work){.options = options, .count = count, .most_members = members};
  BENCH_TRY(create_plans(work));
  BENCH_TRY(allocate(work));
  return fill(work);
}

void bench_work_destroy(struct bench_work *work) {
  void *arrays[] = {work->input,       work->parameters, work->output,         work->variance,
                    work->reciprocals, work->half_input, work->dense_incoming, work->incoming,
                    work->table,       work->factors,    work->block_sums};
  for (size_t k = 0; k < sizeof arrays / sizeof arrays[0]; k++)
    cudaFree(arrays[k]);
  onebit_plan_destroy(work->bits);
  onebit_plan_destroy(work->half);
  onebit_plan_destroy(work->dense);
  onebit_comm_destroy(work->comm);
}
