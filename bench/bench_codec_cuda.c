/* onebit-bench codec -d cuda: each kernel alone, beside what the card's memory allows. */
#include "bench/bench_cuda.h"
#include "bench/bench_passes.h"

static void add_all(struct bench_turns *turns, struct bench_work *work) {
  const struct bench_options *options = work->options;
  bench_add_copies(turns, work);
  bench_add_compress(turns, work, false, false);
  bench_add_compress(turns, work, false, true);
  bench_add_compress(turns, work, true, false);
  for (size_t k = 0; k < options->stream_count; k++)
    bench_add_reduce(turns, work, options->streams[k]);
  bench_add_store(turns, work);
  for (size_t k = 0; k < options->stream_count; k++)
    bench_add_sum(turns, work, options->streams[k]);
  bench_add_apply(turns, work);
  bench_add_adam(turns, work);
  bench_add_dense(turns, work);
}

static int measure(const struct bench_options *options, struct bench_device *device,
                   struct bench_work *work) {
  struct bench_turns turns;
  bench_turns_begin(&turns, options, device, NULL);
  add_all(&turns, work);
  int status = bench_turns_run(&turns);
  struct bench_sheet sheet = {"codec", options, &turns, work->count};
  if (status == BENCH_OK) {
    bench_sheet_head(&sheet, false);
    for (size_t k = 0; k < turns.count; k++)
      bench_sheet_row(&sheet, &turns.puts[k], NULL);
  }
  bench_turns_destroy(&turns);
  return status;
}

static int run_sizes(const struct bench_options *options, struct bench_device *device) {
  int status = BENCH_OK;
  for (size_t bytes = options->smallest; status == BENCH_OK && bytes <= options->largest;
       bytes *= 2) {
    struct bench_work work;
    status = bench_work_create(options, bytes / sizeof(float), bench_most_streams(options), &work);
    if (status == BENCH_OK)
      status = measure(options, device, &work);
    bench_work_destroy(&work);
  }
  return status;
}

int bench_cuda_codec(const struct bench_benchmark *benchmark, const struct bench_options *options,
                     struct bench_team *team) {
  struct bench_device device;
  (void)benchmark, (void)team;
  int status = bench_device_open(0, &device);
  if (status == BENCH_OK)
    status = run_sizes(options, &device);
  bench_device_close(&device);
  return status;
}
