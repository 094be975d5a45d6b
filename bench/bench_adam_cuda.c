/*
 * onebit-bench adam -d cuda: the local work of a compressed step of 1-bit Adam, beside a fused Adam
 * step of the same code, and PyTorch's where that is installed.
 *
 * As on the host there are two readings: the step as it is on one rank, which serves all of the
 * buffer; and the sum of the kernels of a rank among P, which serves a P-th.
 */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/bench_cuda.h"
#include "bench/bench_passes.h"
#include "onebit/cuda.h"

#define LEARNING_RATE 1e-6f

struct step {
  onebit_comm_t comm;
  onebit_optimizer_t optimizer;
  float *parameters;
};

static int run_step(const struct bench_put *put, cudaStream_t stream) {
  const struct step *step = put->context;
  return bench_status(onebit_optimizer_step_stream(step->optimizer, LEARNING_RATE, stream),
                      "onebit_optimizer_step_stream");
}

/* In its compressed stage: one step was made, and the host knows. */
static onebit_status_t warm_up(const struct bench_options *options, const struct bench_work *work,
                               struct step *step) {
  onebit_tensor_t tensor = {
      .parameter = step->parameters, .gradient = work->input, .count = work->count};
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.common.device = ONEBIT_DEVICE_CUDA;
  adam.freeze_step = 1;
  adam.common.scale = options->scale;
  adam.common.block_size = options->block_size;
  adam.common.chunk_size = options->chunk_size;
  onebit_status_t status = onebit_comm_create_self(&step->comm);
  if (status == ONEBIT_OK)
    status = onebit_adam_create(step->comm, &tensor, 1, &adam, &step->optimizer);
  if (status == ONEBIT_OK)
    status = onebit_optimizer_step(step->optimizer, LEARNING_RATE);
  return status == ONEBIT_OK ? onebit_optimizer_synchronize(step->optimizer) : status;
}

static int create_step(const struct bench_options *options, const struct bench_work *work,
                       struct step *step) {
  *step = (struct step){.parameters = bench_device_memory(work->count, sizeof(float))};
  if (!step->parameters) {
    bench_complain("no memory on the device for %zu parameters", work->count);
    return BENCH_FAILED;
  }
  BENCH_TRY(bench_device_fill(step->parameters, work->count, ONEBIT_FLOAT32, 2));
  return bench_status(warm_up(options, work, step), "onebit_adam_create");
}

static void destroy_step(struct step *step) {
  onebit_optimizer_destroy(step->optimizer);
  onebit_comm_destroy(step->comm);
  cudaFree(step->parameters);
}

/* --- The table */

/* Entries' places; from REDUCE on, one a number of members. */
enum { MEMCPY, LOOP, DENSE, STEP, REPLAYED, COMPRESS, APPLY, REDUCE };

/* Compress, apply and a P-th of the reduction, round by round. */
static void print_sum(const struct bench_sheet *sheet, const struct bench_put *reduce,
                      double *times) {
  const struct bench_turns *turns = sheet->turns;
  const struct bench_put *compress = &turns->puts[COMPRESS], *apply = &turns->puts[APPLY];
  double share = 1 / (double)reduce->members;
  struct bench_put sum = {.members = reduce->members, .times = times};
  snprintf(sum.name, sizeof sum.name, "sum, a rank among %zu", reduce->members);
  sum.bytes = compress->bytes + share * reduce->bytes + apply->bytes;
  for (size_t r = 0; r < turns->rounds; r++)
    times[r] = compress->times[r] + share * reduce->times[r] + apply->times[r];
  memcpy(turns->scratch, times, turns->rounds * sizeof *times);
  sum.time = bench_statistics(turns->scratch, turns->rounds);
  bench_sheet_row(sheet, &sum, &turns->puts[DENSE]);
}

static void print_counts(const struct bench_sheet *sheet, const struct bench_work *work) {
  const struct bench_turns *turns = sheet->turns;
  size_t most = bench_most_streams(sheet->options);
  bench_counts_head();
  bench_counts_row(
      &turns->puts[STEP],
      bench_local_bytes(work->bits->geometry.layout.block, 1, ONEBIT_FLOAT32, BENCH_LOCAL_ADAM), 0);
  printf(
      "%-28s%10s%10s%14s%14s%12.2f\n", "  of a rank among them", "-", "-", "0", "2",
      bench_local_bytes(work->bits->geometry.layout.block, most, ONEBIT_FLOAT32, BENCH_LOCAL_ADAM));
  bench_counts_deepspeed();
}

static int report(const struct bench_sheet *sheet, const struct bench_work *work) {
  const struct bench_turns *turns = sheet->turns;
  double *times = malloc(turns->rounds * sizeof *times);
  if (!times) {
    bench_complain("no memory for %zu sums", turns->rounds);
    return BENCH_FAILED;
  }
  bench_sheet_head(sheet, true);
  for (size_t k = 0; k < turns->count; k++)
    bench_sheet_row(sheet, &turns->puts[k], &turns->puts[DENSE]);
  for (size_t k = REDUCE; k < turns->count; k++)
    print_sum(sheet, &turns->puts[k], times);
  if (!sheet->options->json)
    print_counts(sheet, work);
  free(times);
  return BENCH_OK;
}

/* --- PyTorch's fused Adam: a program of its own, on the same number of parameters. */

/* It belongs to the sources: no part of what is installed. */
static const char *find_script(void) {
  const char *named = getenv("ONEBIT_BENCH_TORCH"), *usual = "bench/torch_adam.py";
  return named ? named : access(usual, R_OK) == 0 ? usual : NULL;
}

static void say_without(const struct bench_options *options, const char *why) {
  if (options->json)
    bench_complain("PyTorch's fused Adam: %s", why);
  else
    printf("# PyTorch's fused Adam: %s\n", why);
}

/* Its numbers are seconds: median, minimum, maximum; or words that begin with a letter. */
static void measure_torch(const struct bench_sheet *sheet, const char *script) {
  char command[512], words[256] = "it said nothing";
  const struct bench_turns *turns = sheet->turns;
  struct bench_put torch = {.name = "PyTorch's fused Adam", .bytes = 28 * (double)sheet->elements};
  struct bench_statistics *time = &torch.time;
  snprintf(command, sizeof command, "python3 '%.300s' %zu %zu %zu 2>&1", script, sheet->elements,
           turns->rounds, turns->repeats);
  fflush(stdout);
  FILE *pipe = popen(command, "r");
  while (pipe && fgets(words, sizeof words, pipe))
    words[strcspn(words, "\n")] = '\0';
  if (pipe)
    pclose(pipe);
  if (sscanf(words, "%lf %lf %lf", &time->median, &time->minimum, &time->maximum) != 3)
    say_without(sheet->options, words);
  else
    bench_sheet_row(sheet, &torch, &turns->puts[DENSE]);
}

static void add_torch(const struct bench_sheet *sheet) {
  const char *script = find_script();
  if (BENCH_EMULATED)
    say_without(sheet->options, "not beside an emulated device");
  else if (script)
    measure_torch(sheet, script);
  else
    say_without(sheet->options, "bench/torch_adam.py is not here; ONEBIT_BENCH_TORCH says where");
}

/* --- A size */

static int add_steps(struct bench_turns *turns, struct step *step) {
  struct bench_put *on_stream = bench_turns_add(turns, "1-bit step, one rank");
  struct bench_put *in_graph = bench_turns_add(turns, "  in a graph");
  on_stream->run = run_step;
  on_stream->context = step;
  return bench_put_capture(turns, on_stream, in_graph);
}

static int add_all(struct bench_turns *turns, struct bench_work *work, struct step *step) {
  const struct bench_options *options = work->options;
  bench_add_copies(turns, work);
  bench_add_adam(turns, work);
  BENCH_TRY(add_steps(turns, step));
  double compress = bench_add_compress(turns, work, false, true)->bytes;
  double apply = bench_add_apply(turns, work)->bytes;
  for (size_t k = 0; k < options->stream_count; k++)
    bench_add_reduce(turns, work, options->streams[k]);
  /* The reduction of one rank's message, of all of the buffer. */
  double reduce = bench_reduce_bytes(work, 1);
  turns->puts[STEP].bytes = turns->puts[REPLAYED].bytes = compress + apply + reduce;
  return BENCH_OK;
}

static int measure(const struct bench_options *options, struct bench_device *device,
                   struct bench_work *work, struct step *step) {
  struct bench_turns turns;
  bench_turns_begin(&turns, options, device, NULL);
  struct bench_sheet sheet = {"adam", options, &turns, work->count};
  int status = add_all(&turns, work, step);
  if (status == BENCH_OK)
    status = bench_turns_run(&turns);
  if (status == BENCH_OK)
    status = bench_status(onebit_optimizer_synchronize(step->optimizer), "the steps");
  if (status == BENCH_OK)
    status = report(&sheet, work);
  if (status == BENCH_OK)
    add_torch(&sheet);
  bench_turns_destroy(&turns);
  return status;
}

static int run_size(const struct bench_options *options, struct bench_device *device,
                    size_t count) {
  struct bench_work work;
  struct step step = {.comm = NULL};
  int status = bench_work_create(options, count, bench_most_streams(options), &work);
  if (status == BENCH_OK)
    status = create_step(options, &work, &step);
  if (status == BENCH_OK)
    status = measure(options, device, &work, &step);
  destroy_step(&step);
  bench_work_destroy(&work);
  return status;
}

int bench_cuda_adam(const struct bench_benchmark *benchmark, const struct bench_options *options,
                    struct bench_team *team) {
  struct bench_device device;
  (void)benchmark, (void)team;
  int status = bench_device_open(0, &device);
  for (size_t bytes = options->smallest; status == BENCH_OK && bytes <= options->largest;
       bytes *= 2)
    status = run_size(options, &device, bytes / sizeof(float));
  bench_device_close(&device);
  return status;
}
