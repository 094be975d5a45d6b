/* The kernels of the library, each alone, as passes over memory of a device, and what they work on:
 * plans of one rank whose kernels are told of more members than there are. */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/bench_copy.h"
#include "bench/bench_cuda.h"
#include "cuda/device.h"
#include "onebit/optimizer.h"

/* What passes have besides on a device. */
struct bench_kernels {
  struct bench_device *device;
  onebit_plan_t half, dense; /* half: of bfloat16; the passes' own plan is of bits */
  void *half_input;
  unsigned char *dense_messages;
  struct piece {
    float *parameters;
    float factors[2]; /* its rate's factor, and its weight decay */
  } * piece;          /* the one that there is */
};

cudaStream_t bench_kernels_stream(const struct bench_passes *passes) {
  return passes->kernels->device->stream;
}

/* --- The kernels, a launch a chunk */

/* The kernels' plan as that of a rank among so many; all of them have messages for its share. */
static struct ob_cuda_plan among(const struct onebit_plan *plan, unsigned char *incoming,
                                 size_t members) {
  struct ob_cuda_plan kernel = plan->device->kernel;
  kernel.geometry.members = members;
  kernel.geometry.incoming = incoming;
  return kernel;
}

static struct ob_cuda_pieces pieces_of(const struct bench_passes *passes, void *buffer) {
  return (struct ob_cuda_pieces){.base = buffer, .step = passes->count * sizeof(float)};
}

static struct ob_cuda_pass pass_of(const struct bench_passes *passes, enum ob_pass_kind kind) {
  const struct bench_kernels *kernels = passes->kernels;
  enum bench_array variance = kind == OB_PASS_APPLY ? BENCH_RECIPROCALS : BENCH_VARIANCE;
  return (struct ob_cuda_pass){.kind = kind,
                               .arrays = {[OB_MOMENTUM] = passes->plan->worker.values[0],
                                          [OB_VARIANCE] = passes->arrays[variance],
                                          [OB_SCRATCH] = passes->plan->worker.values[1]},
                               .parameters = &kernels->piece->parameters,
                               .rate_factors = kernels->piece->factors,
                               .weight_decays = kernels->piece->factors + 1,
                               .learning_rate = passes->learning_rate,
                               .factors = {.adam = bench_factors,
                                           .gradient_factor = 1,
                                           .bound = ONEBIT_STEP_BOUND,
                                           .keep_zero = true},
                               .sums = {passes->sums[0]}};
}

static struct ob_cuda_source source_of(const struct bench_passes *passes, void *input,
                                       bool momentum) {
  return (struct ob_cuda_source){.inputs = pieces_of(passes, input),
                                 .factor = 1,
                                 .momentum = momentum,
                                 .decay = bench_factors.beta1,
                                 .weight = momentum ? bench_factors.one_minus_beta1 : 1};
}

/* A pass that is so many launches, each of a chunk, on stream `s`, of entry `e` of passes `p` with
 * kernels `k`. */
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

KERNEL(compress, p->plan->geometry.chunks,
       ob_cuda_compress(p->plan->device->kernel, source_of(p, p->input, e->pass->momentum), chunk,
                        s))
KERNEL(compress_half, k->half->geometry.chunks,
       ob_cuda_compress(k->half->device->kernel, source_of(p, k->half_input, false), chunk, s))
KERNEL(reduce, p->plan->geometry.chunks,
       ob_cuda_reduce(among(p->plan, p->messages, e->streams), chunk, s))
KERNEL(sum, p->plan->geometry.chunks,
       ob_cuda_sum(among(p->plan, p->messages, e->streams), pieces_of(p, p->arrays[BENCH_OUTPUT]),
                   chunk, s))
KERNEL(store, p->plan->geometry.chunks,
       ob_cuda_store(p->plan->device->kernel, pieces_of(p, p->arrays[BENCH_OUTPUT]), chunk, s))
KERNEL(apply, p->plan->geometry.chunks,
       ob_cuda_apply(p->plan->device->kernel, pass_of(p, OB_PASS_APPLY), chunk, s))
KERNEL(load, k->dense->geometry.chunks,
       ob_cuda_load(k->dense->device->kernel, source_of(p, p->input, false), chunk, s))
KERNEL(mean, k->dense->geometry.chunks,
       ob_cuda_mean(among(k->dense, k->dense_messages, e->streams), chunk, s))
KERNEL(convert, k->dense->geometry.chunks,
       ob_cuda_convert(k->dense->device->kernel, pieces_of(p, p->arrays[BENCH_OUTPUT]), chunk, s))

KERNEL(adam, 1, ob_cuda_pass_over(p->plan->device->kernel, pass_of(p, OB_PASS_ADAM), s))
KERNEL(loop, 1, bench_copy_loop(p->arrays[BENCH_OUTPUT], p->input, p->count * sizeof(float), s))
KERNEL(copy_memory, 1,
       cudaMemcpyAsync(p->arrays[BENCH_OUTPUT], p->input, p->count * sizeof(float),
                       cudaMemcpyDeviceToDevice, s))

/* clang-format off */
/* Bytes as the head comments of cuda/ have them: what is read counts once, and so does what is
 * written; a scale is 4 bytes a block, and a sum two of these. */
static const struct bench_pass
    copy = {"cudaMemcpyAsync", copy_memory, .floats = 2},
    copy_loop = {"copy loop", loop, .floats = 2},
    kernel_compress = {"compress", compress, .floats = 3, .bits = 1, .scales = 3},
    kernel_momentum = {"compress with momentum", compress, .floats = 3, .bits = 2, .scales = 4,
                       .momentum = true},
    kernel_half = {"compress bfloat16", compress_half, .floats = 2.5, .bits = 1, .scales = 3},
    kernel_reduce = {"reduce", reduce, .floats = 2, .bits = 1, .scales = 3,
                     .each = {.bits = 1, .scales = 1}, .streams = true},
    kernel_store = {"store", store, .floats = 1, .bits = 1, .scales = 1},
    kernel_sum = {"sum", sum, .floats = 1, .each = {.bits = 1, .scales = 1}, .streams = true},
    kernel_apply = {"Adam apply", apply, .floats = 3, .bits = 1, .scales = 1},
    kernel_adam = {"fused Adam step", adam, .floats = 7, .scales = 2},
    kernel_load = {"load", load, .floats = 2},
    kernel_mean = {"mean", mean, .floats = 1, .each = {.floats = 1}, .streams = true},
    kernel_convert = {"convert", convert, .floats = 2};

const struct bench_list bench_codec_kernels = {NULL, 2, 0, 0,
    {&copy, &copy_loop, &kernel_compress, &kernel_momentum, &kernel_half, &kernel_reduce,
     &kernel_store, &kernel_sum, &kernel_apply, &kernel_adam, &kernel_load, &kernel_mean,
     &kernel_convert}};
const struct bench_list bench_adam_kernels = {NULL, 2, 1, 2,
    {&copy, &copy_loop, &kernel_adam, &bench_step, &kernel_momentum, &kernel_apply,
     &kernel_reduce}};
/* clang-format on */

/* --- What they work on */

static int create_plans(const struct bench_options *options, struct bench_passes *passes) {
  struct bench_kernels *kernels = passes->kernels;
  onebit_status_t status = onebit_comm_create_self(&passes->comm);
  if (status == ONEBIT_OK)
    status = bench_passes_plan(options, ONEBIT_FLOAT32, ONEBIT_WIRE_BITS, passes, &passes->plan);
  if (status == ONEBIT_OK)
    status = bench_passes_plan(options, ONEBIT_BFLOAT16, ONEBIT_WIRE_BITS, passes, &kernels->half);
  if (status == ONEBIT_OK)
    status = bench_passes_plan(options, ONEBIT_FLOAT32, ONEBIT_WIRE_DENSE, passes, &kernels->dense);
  return bench_status(status, "onebit_plan_create");
}

static int allocate(struct bench_passes *passes) {
  struct bench_kernels *kernels = passes->kernels;
  void *(*get)(size_t, size_t) = ob_memory_cuda.allocate;
  BENCH_TRY(bench_passes_allocate(passes, 0, BENCH_MOMENTUM));
  passes->input = passes->arrays[BENCH_GRADIENT];
  passes->messages = get(passes->streams, passes->plan->geometry.peer_stride);
  passes->sums[0] = get(passes->plan->geometry.layout.blocks, sizeof(double));
  kernels->half_input = get(passes->count, 2);
  kernels->dense_messages = get(passes->streams, kernels->dense->geometry.peer_stride);
  kernels->piece = get(1, sizeof *kernels->piece);
  return passes->messages && passes->sums[0] && kernels->half_input && kernels->dense_messages &&
                 kernels->piece
             ? BENCH_OK
             : bench_no_memory("elements on the device", passes->count);
}

/* A message of random bits, or values, in each slot; the messages of so many members, and of the
 * one that there is. Dense ones are all the same: they are long, and no kernel looks at what is in
 * them. */
static onebit_status_t fill_messages(const struct onebit_plan *plan, unsigned char *incoming,
                                     size_t members) {
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

static onebit_status_t fill_residual(const struct ob_cuda_residual *residual,
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

static onebit_status_t fill(struct bench_passes *passes) {
  struct bench_kernels *kernels = passes->kernels;
  const struct onebit_plan *plans[] = {passes->plan, kernels->half};
  const struct piece piece = {passes->arrays[BENCH_PARAMETERS], {1, 0}};
  onebit_status_t status = ob_memory_cuda.copy(kernels->piece, &piece, sizeof piece);
  for (int k = 0; k < 4 && status == ONEBIT_OK; k++) {
    const struct ob_cuda_plan *kernel = &plans[k / 2]->device->kernel;
    status = fill_residual(k % 2 ? &kernel->server : &kernel->worker, passes,
                           plans[k / 2]->work.one_scale);
  }
  if (status == ONEBIT_OK)
    status = fill_messages(passes->plan, passes->messages, passes->streams);
  if (status == ONEBIT_OK)
    status = fill_messages(kernels->dense, kernels->dense_messages, passes->streams);
  return status;
}

int bench_kernels_create(struct bench_job *job, size_t count, size_t streams,
                         struct bench_passes *passes) {
  *passes = (struct bench_passes){.space = &bench_space_cuda,
                                  .count = count,
                                  .streams = streams,
                                  .learning_rate = BENCH_LEARNING_RATE,
                                  .kernels = ob_allocate(1, sizeof *passes->kernels)};
  if (!passes->kernels)
    return bench_no_memory("elements", count);
  passes->kernels->device = job->device;
  BENCH_TRY(create_plans(job->options, passes));
  BENCH_TRY(allocate(passes));
  BENCH_TRY(
      bench_space_fill(passes->space, passes->kernels->half_input, count, ONEBIT_BFLOAT16, 1));
  return bench_status(fill(passes), "filling arrays of the device");
}

void bench_kernels_destroy(struct bench_kernels *kernels) {
  if (!kernels)
    return;
  ob_memory_cuda.release(kernels->half_input);
  ob_memory_cuda.release(kernels->dense_messages);
  ob_memory_cuda.release(kernels->piece);
  onebit_plan_destroy(kernels->half);
  onebit_plan_destroy(kernels->dense);
  ob_release(kernels);
}

/* --- PyTorch's fused Adam: a program of its own, on the same number of parameters. */

static void say_without(const struct bench_job *job, const char *why) {
  bench_note(job->table, "PyTorch's fused Adam: %s", why);
  if (job->table->format != BENCH_TEXT)
    bench_complain("PyTorch's fused Adam: %s", why);
}

void bench_note_deepspeed(struct bench_table *table) {
  bench_note(table, "DeepSpeed's 1-bit allreduce, by the source of its backend over NCCL: 35 "
                    "kernels, 2 host waits, 4 collectives, about 180 bytes an element");
}

/* Its numbers are seconds: median, minimum, maximum; or a message that begins with a letter. The
 * script belongs to the sources: no part of what is installed. */
void bench_torch(const struct bench_sheet *sheet) {
  const char *named = getenv("ONEBIT_BENCH_TORCH"), *script = named ? named : "bench/torch_adam.py";
  char command[512], message[256] = "it said nothing";
  struct bench_entry torch = {.name = "PyTorch's fused Adam",
                              .bytes = 28 * (double)sheet->passes->count};
  struct bench_statistics *time = &torch.time;
  bench_note_deepspeed(sheet->job->table);
  if (BENCH_EMULATED) {
    say_without(sheet->job, "not beside an emulated device");
    return;
  }
  if (!named && access(script, R_OK) != 0) {
    say_without(sheet->job, "bench/torch_adam.py is not here; ONEBIT_BENCH_TORCH says where");
    return;
  }
  snprintf(command, sizeof command, "python3 '%.300s' %zu %zu %zu 2>&1", script,
           sheet->passes->count, sheet->rounds.rounds, sheet->rounds.repeats);
  fflush(stdout);
  FILE *pipe = popen(command, "r");
  while (pipe && fgets(message, sizeof message, pipe))
    message[strcspn(message, "\n")] = '\0';
  if (pipe)
    pclose(pipe);
  if (sscanf(message, "%lf %lf %lf", &time->median, &time->minimum, &time->maximum) == 3)
    bench_sheet_row(sheet, &torch);
  else
    say_without(sheet->job, message);
}
