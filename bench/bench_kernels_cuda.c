/* Times each kernel of the library alone, as a pass over device memory. The plans have one rank,
 * but the kernels that read the messages of several ranks get as many members as --streams says. */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/bench_passes.h"
#include "cuda/device.h"
#include "onebit/cuda.h"
#include "onebit/optimizer.h"

enum { DTYPES = ONEBIT_FLOAT16 + 1 };

/* The additional operands of passes on a device. */
struct bench_kernels {
  struct bench_device *device;
  onebit_plan_t bits[DTYPES], dense[DTYPES]; /* bits[ONEBIT_FLOAT32] is passes->plan */
  void *inputs[DTYPES];                      /* inputs[ONEBIT_FLOAT32] is passes->input */
  unsigned char *dense_messages;
  struct piece {
    float *parameters;
    void *gradients[DTYPES];
    float factors[2]; /* factor of the learning rate; weight decay */
  } * piece;          /* an array of one piece */
};

/* --- The kernels, with one launch for each chunk */

/* Returns the kernels' view of a plan with `members` ranks instead of one. `incoming` has a message
 * of each rank for this rank's segment. */
static struct ob_cuda_plan plan_among(const struct onebit_plan *plan, unsigned char *incoming,
                                      size_t members) {
  struct ob_cuda_plan kernel = plan->device->kernel;
  kernel.geometry.members = members;
  kernel.geometry.incoming = incoming;
  return kernel;
}

static struct ob_cuda_pieces make_pieces(const struct bench_passes *passes, void *buffer) {
  return (struct ob_cuda_pieces){.base = buffer, .step = passes->count * sizeof(float)};
}

static struct ob_cuda_pass make_cuda_pass(const struct bench_passes *passes,
                                          const struct bench_pass *pass) {
  const struct bench_kernels *kernels = passes->kernels;
  enum bench_array variance = pass->frozen ? BENCH_RECIPROCALS : BENCH_VARIANCE;
  struct ob_cuda_pass of = {.kind = pass->kind,
                            .arrays = {[OB_MOMENTUM] = passes->plan->state->worker.values[0],
                                       [OB_VARIANCE] = passes->arrays[variance],
                                       [OB_FRESH] = passes->arrays[BENCH_FRESH],
                                       [OB_ANCHOR] = passes->arrays[BENCH_ANCHOR],
                                       [OB_SCRATCH] = passes->plan->state->worker.values[1]},
                            .parameters = &kernels->piece->parameters,
                            .gradients = &kernels->piece->gradients[pass->dtype],
                            .gradient_dtype = pass->dtype,
                            .rate_factors = kernels->piece->factors,
                            .weight_decays = kernels->piece->factors + 1,
                            .learning_rate = passes->learning_rate,
                            .last_decay = bench_factors.beta1,
                            .factors = {.adam = bench_factors,
                                        .lion = bench_lion_factors,
                                        .gradient_factor = 1,
                                        .rate_sum = 1,
                                        .bound = ONEBIT_STEP_BOUND,
                                        .keep_zero = true}};
  for (int k = 0; k < OB_SUMS; k++)
    of.sums[k] = ob_pass_sums(of.kind) & OB_MASK(k) ? passes->sums[k] : NULL;
  return of;
}

static struct ob_cuda_source make_kernel_source(const struct bench_passes *passes,
                                                const struct bench_pass *pass) {
  return (struct ob_cuda_source){
      .inputs = make_pieces(passes, passes->kernels->inputs[pass->dtype]),
      .factor = 1,
      .momentum = pass->momentum,
      .decay = bench_factors.beta1,
      .weight = pass->momentum || pass->moments ? bench_factors.one_minus_beta1 : 1,
      .reciprocals = pass->reciprocals ? passes->arrays[BENCH_RECIPROCALS] : NULL,
      .moment_rule = pass->moments ? OB_MOMENTS_SECOND : OB_MOMENTS_NONE,
      .moment = {bench_factors.beta2, bench_factors.one_minus_beta2, bench_factors.epsilon,
                 .now = 0.0625f, .before = 0.1875f}};
}

/* Returns the kernels' view of the plan, with moments if the pass uses them. */
static struct ob_cuda_plan plan_with_moments(const struct bench_passes *passes,
                                             const struct bench_pass *pass) {
  struct ob_cuda_plan kernel = passes->kernels->bits[pass->dtype]->device->kernel;
  for (int k = 0; k < 2; k++)
    kernel.worker.moments[k] = pass->moments ? passes->moments[k] : NULL;
  return kernel;
}

/* Defines `function`, which runs a pass: the expression `launch` once for each of `count` chunks.
 * `launch` may use the entry `e`, its passes `p`, their kernels `k` and the stream `s`. */
#define KERNEL(function, count, launch)                                                            \
  static int function(const struct bench_entry *e) {                                               \
    struct bench_passes *p = e->context;                                                           \
    struct bench_kernels *k = p->kernels;                                                          \
    cudaStream_t s = k->device->stream;                                                            \
    (void)k;                                                                                       \
    for (size_t chunk = 0; chunk < (count); chunk++)                                               \
      BENCH_TRY_CUDA(launch);                                                                      \
    return BENCH_OK;                                                                               \
  }

KERNEL(compress, k->bits[e->pass->dtype]->geometry.chunks,
       ob_cuda_compress(plan_with_moments(p, e->pass), make_kernel_source(p, e->pass), chunk, s))
KERNEL(reduce, p->plan->geometry.chunks,
       ob_cuda_reduce(plan_among(p->plan, p->messages, e->streams), chunk, s))
KERNEL(sum, p->plan->geometry.chunks,
       ob_cuda_sum(plan_among(p->plan, p->messages, e->streams),
                   make_pieces(p, p->arrays[BENCH_OUTPUT]), chunk, s))
KERNEL(store, p->plan->geometry.chunks,
       ob_cuda_store(p->plan->device->kernel, make_pieces(p, p->arrays[BENCH_OUTPUT]), chunk, s))
KERNEL(apply, p->plan->geometry.chunks,
       ob_cuda_apply(p->plan->device->kernel, make_cuda_pass(p, e->pass), chunk, s))
KERNEL(load, k->dense[e->pass->dtype]->geometry.chunks,
       ob_cuda_load(k->dense[e->pass->dtype]->device->kernel, make_kernel_source(p, e->pass), chunk,
                    s))
KERNEL(mean, k->dense[0]->geometry.chunks,
       ob_cuda_mean(plan_among(k->dense[0], k->dense_messages, e->streams), chunk, s))
KERNEL(convert, k->dense[0]->geometry.chunks,
       ob_cuda_convert(k->dense[0]->device->kernel, make_pieces(p, p->arrays[BENCH_OUTPUT]), chunk,
                       s))

KERNEL(over, 1, ob_cuda_pass_over(p->plan->device->kernel, make_cuda_pass(p, e->pass), s))
KERNEL(copy_memory, 1,
       cudaMemcpyAsync(p->arrays[BENCH_OUTPUT], p->input, p->count * sizeof(float),
                       cudaMemcpyDeviceToDevice, s))

/* clang-format off */
/* The passes, with the traffic that the comments at the top of the files in cuda/ give. Memory that
 * is both read and written counts twice. A scale has 4 bytes per block, and a sum has 8. */
static const struct bench_pass
    copy = {"cudaMemcpyAsync", copy_memory, .floats = 2},
    kernel_compress = {"compress", compress, .floats = 3, .bits = 1, .scales = 3},
    kernel_momentum = {"compress with momentum", compress, .floats = 3, .bits = 2, .scales = 4,
                       .momentum = true},
    kernel_bfloat16 = {"compress bfloat16", compress, .dtype = ONEBIT_BFLOAT16, .floats = 2.5,
                       .bits = 1, .scales = 3},
    kernel_float16 = {"compress float16", compress, .dtype = ONEBIT_FLOAT16, .floats = 2.5,
                      .bits = 1, .scales = 3},
    kernel_reduce = {"reduce", reduce, .floats = 2, .bits = 1, .scales = 3,
                     .each = {.bits = 1, .scales = 1}, .streams = true},
    kernel_store = {"store", store, .floats = 1, .bits = 1, .scales = 1},
    kernel_sum = {"sum", sum, .floats = 1, .each = {.bits = 1, .scales = 1}, .streams = true},
    kernel_apply = {"Adam apply", apply, .floats = 3, .bits = 1, .scales = 1,
                    .kind = OB_PASS_APPLY, .frozen = true},
    kernel_adam = {"fused Adam step", over, .floats = 7, .scales = 2, .kind = OB_PASS_ADAM},
    kernel_load = {"load", load, .floats = 2},
    load_bfloat16 = {"load bfloat16", load, .dtype = ONEBIT_BFLOAT16, .floats = 1.5},
    load_float16 = {"load float16", load, .dtype = ONEBIT_FLOAT16, .floats = 1.5},
    kernel_mean = {"mean", mean, .floats = 1, .each = {.floats = 1}, .streams = true},
    kernel_convert = {"convert", convert, .floats = 2};

/* Passes of optimizers. If a row sets no memory traffic, the traffic follows from the kind of the
 * pass. */
static const struct bench_pass
    compress_step = {"compress step", compress, .floats = 4, .bits = 2, .scales = 4,
                     .momentum = true, .reciprocals = true},
    compress_normalized = {"compress normalized", compress, .floats = 4, .bits = 2, .scales = 4,
                           .momentum = true, .moments = true},
    apply_step = {"apply step", apply, .kind = OB_PASS_APPLY_STEP},
    sgd = {"momentum SGD step", over, .kind = OB_PASS_SGD},
    lion = {"Lion step", over, .kind = OB_PASS_LION},
    lamb = {"LAMB step", over, .kind = OB_PASS_LAMB},
    lamb_move = {"LAMB move", over, .kind = OB_PASS_LAMB_MOVE},
    lamb_fresh = {"LAMB fresh", apply, .kind = OB_PASS_LAMB_FRESH, .frozen = true},
    zero_one = {"0/1 Adam apply", apply, .kind = OB_PASS_ZERO_ONE, .frozen = true},
    zero_one_local = {"0/1 Adam local", over, .kind = OB_PASS_ZERO_ONE_LOCAL, .frozen = true},
    zero_one_meet = {"0/1 Adam sync send", over, .kind = OB_PASS_ZERO_ONE_STORE, .frozen = true},
    zero_one_met = {"0/1 Adam sync apply", apply, .kind = OB_PASS_ZERO_ONE_MET, .frozen = true},
    squares = {"squares", over, .kind = OB_PASS_SQUARES},
    squares_float16 = {"squares float16", over, .dtype = ONEBIT_FLOAT16, .floats = 0.5,
                       .kind = OB_PASS_SQUARES};

const struct bench_list bench_codec_kernels = {
    {&copy, &kernel_compress, &kernel_momentum, &kernel_bfloat16, &kernel_float16,
     &kernel_reduce, &kernel_store, &kernel_sum, &kernel_apply, &kernel_adam, &kernel_load,
     &load_bfloat16, &load_float16, &kernel_mean, &kernel_convert}};
const struct bench_list bench_optimizer_kernels = {
    {&copy, &kernel_adam, &compress_step, &compress_normalized, &apply_step, &sgd,
     &lion, &lamb, &lamb_move, &lamb_fresh, &zero_one, &zero_one_local, &zero_one_meet,
     &zero_one_met, &squares, &squares_float16}};
/* clang-format on */

/* --- Data of the kernels */

static int kernels_create_plans(const struct bench_options *options, struct bench_passes *passes) {
  struct bench_kernels *kernels = passes->kernels;
  onebit_status_t status = onebit_comm_create_self(&passes->comm);
  for (int k = 0; k < DTYPES && status == ONEBIT_OK; k++) {
    onebit_dtype_t dtype = (onebit_dtype_t)k;
    onebit_plan_t *bits = &kernels->bits[k], *dense = &kernels->dense[k];
    status = bench_passes_create_plan(options, dtype, ONEBIT_WIRE_BITS, passes, bits);
    if (status == ONEBIT_OK) {
      (*bits)->device->kernel.seals = false; /* leaves sealing out of the kernel's time */
      status = bench_passes_create_plan(options, dtype, ONEBIT_WIRE_DENSE, passes, dense);
    }
  }
  passes->plan = kernels->bits[ONEBIT_FLOAT32];
  return bench_check_status(status, "onebit_plan_create");
}

static int create_inputs(struct bench_passes *passes) {
  void **inputs = passes->kernels->inputs;
  inputs[ONEBIT_FLOAT32] = passes->input = passes->arrays[BENCH_GRADIENT];
  for (int k = ONEBIT_FLOAT32 + 1; k < DTYPES; k++) {
    inputs[k] = ob_memory_cuda.allocate(passes->count, 2);
    if (!inputs[k])
      return bench_report_no_memory("elements on the device", passes->count);
    BENCH_TRY(bench_space_fill(passes->space, inputs[k], passes->count, (onebit_dtype_t)k, 1));
  }
  return BENCH_OK;
}

static int kernels_allocate(struct bench_passes *passes) {
  struct bench_kernels *kernels = passes->kernels;
  void *(*get)(size_t, size_t) = ob_memory_cuda.allocate;
  BENCH_TRY(bench_passes_allocate(passes, 0, BENCH_MOMENTUM));
  BENCH_TRY(create_inputs(passes));
  passes->messages = get(passes->streams, passes->plan->geometry.peer_stride);
  passes->sums[0] = get(passes->plan->geometry.layout.blocks, sizeof(double));
  kernels->dense_messages = get(passes->streams, kernels->dense[0]->geometry.peer_stride);
  kernels->piece = get(1, sizeof *kernels->piece);
  return passes->messages && passes->sums[0] && kernels->dense_messages && kernels->piece
             ? BENCH_OK
             : bench_report_no_memory("elements on the device", passes->count);
}

/* Fills each slot with a message of random bits or values, from each member and from the rank
 * itself. Dense messages of all members are equal, to save time: they are long, and the time of a
 * kernel does not depend on their contents. */
static onebit_status_t kernels_fill_messages(const struct onebit_plan *plan,
                                             unsigned char *incoming, size_t members) {
  const struct ob_cuda_plan *kernel = &plan->device->kernel;
  size_t slots =
      plan->geometry.slots < plan->geometry.chunks ? plan->geometry.slots : plan->geometry.chunks;
  unsigned char *messages = ob_allocate(1, plan->geometry.peer_stride);
  unsigned char *own[] = {kernel->geometry.outgoing, kernel->geometry.results[0],
                          kernel->geometry.results[1]};
  onebit_status_t status = messages ? ONEBIT_OK : ONEBIT_ERROR_MEMORY;
  for (size_t m = 0; m < members && status == ONEBIT_OK; m++) {
    for (size_t slot = 0; slot < slots && (m == 0 || !kernel->geometry.dense); slot++) {
      struct ob_message_shape shape = ob_plan_message(plan, 0, slot);
      bench_fill_message(messages + slot * plan->geometry.stride, &shape, m * slots + slot + 1);
    }
    status = ob_memory_cuda.copy(incoming + m * plan->geometry.peer_stride, messages,
                                 plan->geometry.peer_stride);
  }
  for (size_t k = 0; k < 3 && status == ONEBIT_OK; k++)
    if (own[k])
      status = ob_memory_cuda.copy(own[k], messages, plan->geometry.peer_stride);
  ob_release(messages);
  return status;
}

static onebit_status_t kernels_fill_residual(const struct ob_cuda_residual *residual,
                                             const struct bench_passes *passes, bool one_scale) {
  onebit_status_t status = ONEBIT_OK;
  size_t scales = one_scale ? 1 : residual->blocks;
  for (int k = 0; k < 2 && status == ONEBIT_OK; k++) {
    status = ob_memory_cuda.copy(residual->values[k], passes->input, passes->count * sizeof(float));
    if (status == ONEBIT_OK)
      status = ob_memory_cuda.copy(residual->scales[k], passes->arrays[BENCH_RECIPROCALS],
                                   scales * sizeof(float));
  }
  return status;
}

static onebit_status_t kernels_fill(struct bench_passes *passes) {
  struct bench_kernels *kernels = passes->kernels;
  struct piece piece = {.parameters = passes->arrays[BENCH_PARAMETERS], .factors = {1, 0}};
  memcpy(piece.gradients, kernels->inputs, sizeof piece.gradients);
  onebit_status_t status = ob_memory_cuda.copy(kernels->piece, &piece, sizeof piece);
  for (int k = 0; k < 2 * DTYPES && status == ONEBIT_OK; k++) {
    const struct onebit_plan *plan = kernels->bits[k / 2];
    const struct ob_cuda_plan *kernel = &plan->device->kernel;
    status = kernels_fill_residual(k % 2 ? &kernel->server : &kernel->worker, passes,
                                   plan->state->work.one_scale);
  }
  if (status == ONEBIT_OK)
    status = kernels_fill_messages(passes->plan, passes->messages, passes->streams);
  if (status == ONEBIT_OK)
    status = kernels_fill_messages(kernels->dense[0], kernels->dense_messages, passes->streams);
  return status;
}

int bench_kernels_extend(struct bench_passes *passes) {
  const struct onebit_plan *plan = passes->plan;
  BENCH_TRY(bench_passes_allocate(passes, BENCH_FRESH, BENCH_ARRAYS));
  for (int k = 1; k < OB_SUMS; k++)
    if (!(passes->sums[k] = ob_memory_cuda.allocate(plan->geometry.layout.blocks, sizeof(double))))
      return bench_report_no_memory("sums", plan->geometry.layout.blocks);
  for (int k = 0; k < 2; k++)
    if (!(passes->moments[k] = ob_memory_cuda.allocate(passes->count, sizeof(uint16_t))))
      return bench_report_no_memory("moments", passes->count);
  return ob_cuda_settle() == ONEBIT_OK ? BENCH_OK : bench_report_no_memory("passes", passes->count);
}

int bench_kernels_create(struct bench_job *job, size_t count, size_t streams,
                         struct bench_passes *passes) {
  *passes = (struct bench_passes){.job = job,
                                  .space = &bench_space_cuda,
                                  .count = count,
                                  .streams = streams,
                                  .learning_rate = BENCH_LEARNING_RATE,
                                  .kernels = ob_allocate(1, sizeof *passes->kernels)};
  if (!passes->kernels)
    return bench_report_no_memory("elements", count);
  passes->kernels->device = job->device;
  BENCH_TRY(kernels_create_plans(job->options, passes));
  BENCH_TRY(kernels_allocate(passes));
  return bench_check_status(kernels_fill(passes), "filling arrays of the device");
}

void bench_kernels_destroy(struct bench_kernels *kernels) {
  if (!kernels)
    return;
  for (int k = 0; k < DTYPES; k++) {
    onebit_plan_destroy(kernels->dense[k]);
    if (k == ONEBIT_FLOAT32)
      continue; /* bench_passes_destroy frees the plan and the input of float32 */
    onebit_plan_destroy(kernels->bits[k]);
    ob_memory_cuda.release(kernels->inputs[k]);
  }
  ob_memory_cuda.release(kernels->dense_messages);
  ob_memory_cuda.release(kernels->piece);
  ob_release(kernels);
}

/* --- Steps of optimizers */

int bench_kernels_step(const struct bench_passes *passes, onebit_optimizer_t optimizer) {
  return bench_check_status(onebit_optimizer_step_stream(optimizer, passes->learning_rate,
                                                         passes->kernels->device->stream),
                            "onebit_optimizer_step_stream");
}

onebit_status_t bench_kernels_synchronize(onebit_optimizer_t optimizer) {
  return onebit_optimizer_synchronize(optimizer);
}

int bench_kernels_dense_step(const struct bench_passes *passes, const enum ob_pass_kind kinds[2]) {
  for (int k = 0; k < 2 && kinds[k]; k++) {
    const struct bench_pass pass = {.kind = kinds[k]};
    BENCH_TRY_CUDA(ob_cuda_pass_over(passes->plan->device->kernel, make_cuda_pass(passes, &pass),
                                     passes->kernels->device->stream));
  }
  return BENCH_OK;
}
