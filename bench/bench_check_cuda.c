/*
 * -c with -d cuda: checks that the results are those of the host. The same calls are made once more
 * by threads of this process on the host, as many as there are ranks, whose numbers every rank can
 * make again (bench_fill). Whatever the schedule, they must agree in every bit.
 */
#include <string.h>

#include "base/memory.h"
#include "bench/bench_collective.h"
#include "bench/bench_cuda.h"
#include "compression/numerics.h"
#include "onebit/cuda.h"

struct twin {
  const struct bench_exchange *exchange;
  onebit_schedule_t schedule; /* that the device's plan decided for */
  size_t calls;
  void *result; /* of the rank that asks */
};

static void fill(const struct twin *twin, int rank, float *values) {
  onebit_dtype_t dtype = twin->exchange->options->dtype;
  size_t count = twin->exchange->send_count;
  bench_fill(values, count, (uint64_t)rank + 1);
  for (size_t i = 0; dtype != ONEBIT_FLOAT32 && i < count; i++)
    ob_store(values, i, dtype, values[i]);
}

static onebit_status_t make_calls(const struct twin *twin, const struct bench_team *team,
                                  const void *send, void *receive) {
  const struct bench_exchange *exchange = twin->exchange;
  onebit_plan_options_t options = bench_exchange_options(exchange, ONEBIT_DEVICE_HOST);
  if (options.operation == ONEBIT_ALLREDUCE)
    options.schedule = twin->schedule;
  onebit_plan_t plan;
  onebit_status_t status = onebit_plan_create(team->comm, exchange->count, &options, &plan);
  for (size_t k = 0; status == ONEBIT_OK && k < twin->calls; k++)
    status = exchange->collective->call(send, receive, plan);
  onebit_plan_destroy(plan);
  return status;
}

static int run_twin(struct bench_team *team, const void *context) {
  const struct twin *twin = context;
  const struct bench_exchange *exchange = twin->exchange;
  size_t bytes = exchange->receive_count * ob_dtype_size(exchange->options->dtype);
  float *send = ob_allocate(exchange->send_count, sizeof(float));
  void *receive = ob_allocate(1, bytes);
  int status = BENCH_FAILED;
  if (bench_team_agree(team, send && receive)) {
    fill(twin, team->rank, send);
    status = bench_status(make_calls(twin, team, send, receive), "-c: on the host");
  } else
    bench_complain("-c: no memory for %zu ranks on the host", (size_t)team->size);
  if (status == BENCH_OK && team->rank == exchange->team->rank)
    memcpy(twin->result, receive, bytes);
  ob_release(send);
  ob_release(receive);
  return status;
}

/* What the device has is forgotten before each call. */
static int run_device(const struct bench_exchange *exchange, const struct bench_put *puts,
                      size_t count, void *result) {
  cudaStream_t stream = exchange->device->stream;
  size_t bytes = exchange->receive_count * ob_dtype_size(exchange->options->dtype);
  BENCH_TRY(bench_status(onebit_plan_reset_residual(exchange->plan), "onebit_plan_reset_residual"));
  for (size_t k = 0; k < count; k++) {
    BENCH_TRY_CUDA(cudaMemsetAsync(exchange->receive, 0xff, bytes, stream));
    BENCH_TRY_CUDA(cudaStreamSynchronize(stream));
    BENCH_TRY(puts[k].run(&puts[k], stream));
    BENCH_TRY_CUDA(cudaStreamSynchronize(stream));
  }
  BENCH_TRY(bench_status(onebit_plan_synchronize(exchange->plan), "-c: on the stream"));
  BENCH_TRY_CUDA(cudaMemcpy(result, exchange->receive, bytes, cudaMemcpyDeviceToHost));
  return BENCH_OK;
}

static int compare(const struct twin *twin, const struct bench_put *puts, void *result,
                   bool *right) {
  const struct bench_exchange *exchange = twin->exchange;
  size_t bytes = exchange->receive_count * ob_dtype_size(exchange->options->dtype);
  BENCH_TRY(run_device(exchange, puts, twin->calls, result));
  BENCH_TRY(bench_team_run_threads(exchange->team->size, run_twin, twin));
  *right = memcmp(result, twin->result, bytes) == 0;
  return BENCH_OK;
}

int bench_exchange_check(struct bench_exchange *exchange, const struct bench_put *puts,
                         size_t count, bool *right) {
  size_t bytes = exchange->receive_count * ob_dtype_size(exchange->options->dtype);
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_plan_get_info(exchange->plan, &info);
  if (info.schedule == ONEBIT_SCHEDULE_HIERARCHICAL && info.hosts > 1) {
    if (exchange->team->rank == 0)
      bench_complain("-c: threads are one host, and the hierarchical schedule has %d here",
                     info.hosts);
    return BENCH_USAGE;
  }
  void *result = ob_allocate(1, bytes);
  struct twin twin = {exchange, info.schedule, count, ob_allocate(1, bytes)};
  int status = BENCH_FAILED;
  if (bench_team_agree(exchange->team, result && twin.result))
    status = compare(&twin, puts, result, right);
  ob_release(result);
  ob_release(twin.result);
  *right = bench_team_agree(exchange->team, status == BENCH_OK && *right);
  return status;
}
