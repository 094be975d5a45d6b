/* The collectives with -d cuda: the call, on a stream, in a graph, and what is dense. */
#include <math.h>
#include <string.h>

#include "bench/bench_collective.h"
#include "bench/bench_cuda.h"
#include "onebit/cuda.h"

static onebit_status_t (*const stream_calls[])(const void *, void *, onebit_plan_t,
                                               cudaStream_t) = {
    [ONEBIT_ALLREDUCE] = onebit_allreduce_stream,
    [ONEBIT_ALLGATHER] = onebit_allgather_stream,
    [ONEBIT_REDUCE_SCATTER] = onebit_reduce_scatter_stream,
};

/* --- Entries */

static int run_call(const struct bench_put *put, cudaStream_t stream) {
  const struct bench_exchange *exchange = put->context;
  (void)stream;
  return bench_status(exchange->collective->call(exchange->send, exchange->receive, exchange->plan),
                      put->name);
}

static int run_stream(const struct bench_put *put, cudaStream_t stream) {
  const struct bench_exchange *exchange = put->context;
  return bench_status(stream_calls[exchange->collective->operation](
                          exchange->send, exchange->receive, exchange->plan, stream),
                      put->name);
}

static int run_dense(const struct bench_put *put, cudaStream_t stream) {
  const struct bench_exchange *exchange = put->context;
  return bench_status(onebit_allreduce_stream(exchange->dense_send, exchange->dense_receive,
                                              exchange->dense, stream),
                      put->name);
}

static struct bench_put *add(struct bench_turns *turns, struct bench_exchange *exchange,
                             const char *name, int (*run)(const struct bench_put *, cudaStream_t)) {
  struct bench_put *put = bench_turns_add(turns, "%s", name);
  put->run = run;
  put->context = exchange;
  return put;
}

/* What messages by way of the host cannot be. */
static bool can_capture(const struct bench_exchange *exchange) {
  return exchange->nccl || exchange->team->size == 1;
}

/* Entries' places, where there are so many. */
enum { CALL, STREAM, REPLAYED };

/* *calls: the entries that are the library's, compressed. */
static int add_all(struct bench_turns *turns, struct bench_exchange *exchange, size_t *calls,
                   const struct bench_put **dense) {
  add(turns, exchange, "call", run_call)->waits = true;
  struct bench_put *stream = add(turns, exchange, "on a stream", run_stream);
  if (can_capture(exchange))
    BENCH_TRY(bench_put_capture(turns, stream, bench_turns_add(turns, "  in a graph")));
  else
    BENCH_TRY(bench_put_count(turns, stream));
  *calls = turns->count;
  *dense = NULL;
  if (exchange->dense)
    *dense = add(turns, exchange, "dense wire, on a stream", run_dense);
#ifdef ONEBIT_HAVE_NCCL
  if (exchange->nccl && !exchange->options->no_dense)
    *dense = bench_nccl_add(turns, exchange);
#endif
  return BENCH_OK;
}

/* --- Rows */

static double larger_bytes(const struct bench_exchange *exchange) {
  size_t count = exchange->send_count > exchange->receive_count ? exchange->send_count
                                                                : exchange->receive_count;
  return (double)(count * sizeof(float));
}

static double passes(const struct bench_exchange *exchange) {
  double ranks = exchange->team->size;
  return (exchange->collective->operation == ONEBIT_ALLREDUCE ? 2 : 1) * (ranks - 1) / ranks;
}

struct outcome {
  const struct bench_put *dense;
  size_t calls;
  bool right;
};

static onebit_plan_info_t info_of(const struct bench_exchange *exchange) {
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_plan_get_info(exchange->plan, &info);
  return info;
}

static void print_head(const struct bench_exchange *exchange) {
  onebit_plan_info_t info = info_of(exchange);
  bench_device_print(exchange->device, exchange->collective->name);
  printf("# %d ranks over %s, schedule %s, wire %s, %s\n", exchange->team->size, info.transport,
         bench_schedule_name(info.schedule), bench_wire_name(info.wire),
         bench_dtype_name(exchange->options->dtype));
  printf("# Size: bytes of a rank's %s as float32. Times: of the slowest rank\n",
         exchange->collective->gathers ? "part" : "send buffer");
  printf("%-12s  %-26s%12s%12s%12s%14s%13s%13s%10s%9s%8s%12s%s\n", "# Size", "Row", "Median(us)",
         "Min(us)", "Max(us)", "Wire(B/rank)", "algbw(GB/s)", "busbw(GB/s)", "Speed-up", "Kernels",
         "Copies", "Host waits", exchange->options->check ? "  Validation" : "");
}

/* Against the dense entry, median over the rounds. */
static double speed_up(const struct bench_turns *turns, const struct bench_put *put,
                       const struct bench_put *dense) {
  if (!dense)
    return NAN;
  return bench_ratio(dense->times, put->times, turns->rounds, turns->scratch).median;
}

static void print_counts(const struct bench_counts *counts) {
  if (counts->known)
    printf("%9zu%8zu%12zu", counts->kernels, counts->copies, counts->synchronisations);
  else
    printf("%9s%8s%12s", "-", "-", "-");
}

static void print_text(const struct bench_exchange *exchange, const struct bench_turns *turns,
                       const struct bench_put *put, const struct outcome *outcome) {
  const struct bench_statistics *time = &put->time;
  bool own = put < turns->puts + outcome->calls;
  double algbw = 1e-9 * larger_bytes(exchange) / time->median;
  printf("%-12zu  %-26s%12.2f%12.2f%12.2f", exchange->send_count * sizeof(float), put->name,
         1e6 * time->median, 1e6 * time->minimum, 1e6 * time->maximum);
  if (own)
    printf("%14.0f", (double)info_of(exchange).wire_bytes);
  else
    printf("%14s", "-");
  printf("%13.3f%13.3f", algbw, algbw * passes(exchange));
  if (outcome->dense)
    printf("%10.2f", speed_up(turns, put, outcome->dense));
  else
    printf("%10s", "-");
  print_counts(&put->counts);
  if (exchange->options->check)
    printf("%12s", !own ? "-" : outcome->right ? "Pass" : "Fail");
  printf("\n");
}

static void print_json(const struct bench_exchange *exchange, const struct bench_turns *turns,
                       const struct bench_put *put, const struct outcome *outcome) {
  onebit_plan_info_t info = info_of(exchange);
  bool own = put < turns->puts + outcome->calls;
  double algbw = 1e-9 * larger_bytes(exchange) / put->time.median;
  printf("{\"benchmark\":\"%s\"", exchange->collective->name);
  bench_json_device(exchange->device);
  bench_json_whole(stdout, "bytes", exchange->send_count * sizeof(float));
  bench_json_whole(stdout, "ranks", (size_t)exchange->team->size);
  bench_json_text(stdout, "transport", info.transport);
  bench_json_text(stdout, "row", put->name);
  bench_json_text(stdout, "schedule", own ? bench_schedule_name(info.schedule) : NULL);
  bench_json_text(stdout, "wire", own ? bench_wire_name(info.wire) : NULL);
  bench_json_text(stdout, "dtype", own ? bench_dtype_name(exchange->options->dtype) : NULL);
  bench_json_put(turns, put);
  bench_json_number(stdout, "wire_bytes", own ? (double)info.wire_bytes : NAN);
  bench_json_number(stdout, "algbw", algbw);
  bench_json_number(stdout, "busbw", algbw * passes(exchange));
  bench_json_number(stdout, "speedup", speed_up(turns, put, outcome->dense));
  if (exchange->options->check)
    printf(",\"right\":%s", !own ? "null" : outcome->right ? "true" : "false");
  printf("}\n");
}

static void print_all(const struct bench_exchange *exchange, const struct bench_turns *turns,
                      const struct outcome *outcome) {
  for (const struct bench_put *put = turns->puts; put < turns->puts + turns->count; put++)
    (exchange->options->json ? print_json : print_text)(exchange, turns, put, outcome);
  fflush(stdout);
}

/* Exchanges of messages between all ranks, each of them one of NCCL's groups. */
static size_t collectives(const struct onebit_plan *plan) {
  size_t rounds = 0;
  if (plan->geometry.members == 1)
    return 0;
  if (plan->schedule != &ob_schedule_doubling)
    return (plan->geometry.whole ? 1 : 2) * plan->geometry.chunks;
  while ((size_t)1 << rounds < plan->geometry.members)
    rounds++;
  return rounds;
}

/* After the last size: of compressed allreduces whose ranks all exchange bits. */
static void print_close(const struct bench_exchange *exchange, const struct bench_put *stream) {
  const struct onebit_plan *plan = exchange->plan;
  if (plan->options.operation != ONEBIT_ALLREDUCE || exchange->options->json ||
      plan->options.wire == ONEBIT_WIRE_DENSE ||
      plan->choice.schedule == ONEBIT_SCHEDULE_HIERARCHICAL)
    return;
  bench_counts_head();
  bench_counts_row(
      stream,
      bench_local_bytes(plan->geometry.layout.block, plan->geometry.members, plan->options.dtype,
                        plan->geometry.whole ? BENCH_LOCAL_GATHER : BENCH_LOCAL_EXCHANGE),
      collectives(plan));
  bench_counts_deepspeed();
}

/* --- A size */

onebit_plan_options_t bench_exchange_options(const struct bench_exchange *exchange,
                                             onebit_device_t device) {
  onebit_plan_options_t plan = ONEBIT_PLAN_OPTIONS_INIT;
  plan.operation = exchange->collective->operation;
  plan.dtype = exchange->options->dtype;
  plan.scale = exchange->options->scale;
  plan.block_size = exchange->options->block_size;
  plan.chunk_size = exchange->options->chunk_size;
  plan.threads = exchange->options->threads;
  plan.schedule = exchange->options->variant.schedule;
  plan.wire = exchange->options->variant.wire;
  plan.device = device;
  return plan;
}

static onebit_status_t create_plans(struct bench_exchange *exchange) {
  onebit_plan_options_t plan = bench_exchange_options(exchange, ONEBIT_DEVICE_CUDA);
  onebit_plan_options_t dense = plan;
  dense.dtype = ONEBIT_FLOAT32;
  dense.wire = ONEBIT_WIRE_DENSE;
  onebit_status_t status =
      onebit_plan_create(exchange->comm, exchange->count, &plan, &exchange->plan);
  if (status == ONEBIT_OK && plan.operation == ONEBIT_ALLREDUCE && !exchange->options->no_dense &&
      plan.wire != ONEBIT_WIRE_DENSE)
    status = onebit_plan_create(exchange->comm, exchange->count, &dense, &exchange->dense);
  return status;
}

static int allocate(struct bench_exchange *exchange) {
  size_t size = ob_dtype_size(exchange->options->dtype), sent = exchange->send_count;
  exchange->send = bench_device_memory(sent, size);
  exchange->receive = bench_device_memory(exchange->receive_count, size);
  exchange->dense_send = bench_device_memory(sent, sizeof(float));
  exchange->dense_receive = bench_device_memory(exchange->receive_count, sizeof(float));
  exchange->half_send = bench_device_memory(sent, 2);
  if (!exchange->send || !exchange->receive || !exchange->dense_send || !exchange->dense_receive ||
      !exchange->half_send) {
    bench_complain("no memory on the device for buffers of %zu elements", sent);
    return BENCH_FAILED;
  }
  uint64_t seed = (uint64_t)exchange->team->rank + 1;
  BENCH_TRY(bench_device_fill(exchange->send, sent, exchange->options->dtype, seed));
  BENCH_TRY(bench_device_fill(exchange->dense_send, sent, ONEBIT_FLOAT32, seed));
  return bench_device_fill(exchange->half_send, sent, ONEBIT_BFLOAT16, seed);
}

static int create(struct bench_exchange *exchange, size_t bytes) {
  const struct bench_collective *collective = exchange->collective;
  size_t ranks = (size_t)exchange->team->size, elements = bytes / sizeof(float);
  size_t share = elements / ranks ? elements / ranks : 1;
  exchange->count = collective->scatters ? share : elements;
  exchange->send_count = exchange->count * (collective->scatters ? ranks : 1);
  exchange->receive_count = exchange->count * (collective->gathers ? ranks : 1);
  BENCH_TRY(bench_status(create_plans(exchange), "onebit_plan_create"));
  return bench_team_agree(exchange->team, allocate(exchange) == BENCH_OK) ? BENCH_OK : BENCH_FAILED;
}

static void destroy(struct bench_exchange *exchange) {
  void *buffers[] = {exchange->send, exchange->receive, exchange->dense_send,
                     exchange->dense_receive, exchange->half_send};
  onebit_plan_destroy(exchange->plan);
  onebit_plan_destroy(exchange->dense);
  for (size_t k = 0; k < sizeof buffers / sizeof buffers[0]; k++)
    cudaFree(buffers[k]);
}

static int measure(struct bench_exchange *exchange, struct bench_turns *turns, bool first,
                   bool last) {
  struct outcome outcome = {.right = true};
  BENCH_TRY(add_all(turns, exchange, &outcome.calls, &outcome.dense));
  BENCH_TRY(bench_turns_run(turns));
  BENCH_TRY(bench_status(onebit_plan_synchronize(exchange->plan), "the calls on the stream"));
  if (exchange->options->check)
    BENCH_TRY(bench_exchange_check(exchange, turns->puts, outcome.calls, &outcome.right));
  if (exchange->team->rank == 0 && first && !exchange->options->json)
    print_head(exchange);
  if (exchange->team->rank == 0)
    print_all(exchange, turns, &outcome);
  if (exchange->team->rank == 0 && last)
    print_close(exchange, &turns->puts[STREAM]);
  return outcome.right ? BENCH_OK : BENCH_FAILED;
}

static int run_size(struct bench_exchange *exchange, size_t bytes, bool first, bool last) {
  struct bench_exchange sized = *exchange;
  struct bench_turns turns;
  bench_turns_begin(&turns, exchange->options, exchange->device, exchange->team);
  int status = create(&sized, bytes);
  if (status == BENCH_OK)
    status = measure(&sized, &turns, first, last);
  bench_turns_destroy(&turns);
  destroy(&sized);
  /* To give memory back waits for the device, which other ranks may share: they must not have begun
   * the next size, in which they wait for this rank. */
  exchange->team->kind->barrier(exchange->team);
  return status;
}

static int run_sizes(struct bench_exchange *exchange) {
  const struct bench_options *options = exchange->options;
  int worst = BENCH_OK;
  for (size_t bytes = options->smallest; bytes <= options->largest; bytes *= 2) {
    int status =
        run_size(exchange, bytes, bytes == options->smallest, bytes * 2 > options->largest);
    worst = status > worst ? status : worst;
    if (status != BENCH_OK)
      break;
  }
  return worst;
}

/* --- The ranks */

/* One rank is alone with itself; others talk over NCCL, or as their team does. */
static int run_over(struct bench_exchange *exchange) {
  struct bench_team *team = exchange->team;
  onebit_comm_t own = NULL;
  int status = BENCH_OK;
  exchange->comm = team->comm;
#ifdef ONEBIT_HAVE_NCCL
  if (exchange->options->nccl)
    status = bench_nccl_create(exchange, &own);
#endif
  if (!exchange->options->nccl && team->size == 1)
    status = bench_status(onebit_comm_create_self(&own), "onebit_comm_create_self");
  if (own)
    exchange->comm = own;
  if (status == BENCH_OK)
    status = run_sizes(exchange);
#ifdef ONEBIT_HAVE_NCCL
  if (exchange->options->nccl) {
    bench_nccl_destroy(exchange->nccl, own);
    return status;
  }
#endif
  onebit_comm_destroy(own);
  return status;
}

/* NCCL wants a GPU for each rank of a process; the emulated one has all its ranks in one. */
static const char *refusal(const struct bench_options *options, const struct bench_team *team) {
  if (!options->nccl || team->size == 1)
    return NULL;
  int count = 0;
  bool threads = options->ranks > 0;
  if (BENCH_EMULATED)
    return threads || options->nccl_ranks
               ? NULL
               : "the emulated device's NCCL knows the ranks of one process: --nccl-ranks";
  if (threads && (cudaGetDeviceCount(&count) != cudaSuccess || team->size > count))
    return "ranks that are threads want a device each; --nccl-ranks starts processes";
  return NULL;
}

int bench_cuda_collective(const struct bench_benchmark *benchmark,
                          const struct bench_options *options, struct bench_team *team) {
  struct bench_device device = {.number = -1};
  struct bench_exchange exchange = {.team = team, .options = options, .device = &device};
  const char *refused = refusal(options, team);
  exchange.collective = bench_find_collective(benchmark->name);
  if (refused && team->rank == 0)
    bench_complain("--transport nccl: %s", refused);
  if (refused)
    return BENCH_USAGE;
  int status = BENCH_FAILED;
  if (bench_seat_find(team, &exchange.seat))
    status = bench_device_open(exchange.seat.rank, &device);
  if (!bench_team_agree(team, status == BENCH_OK))
    status = BENCH_FAILED;
  else
    status = run_over(&exchange);
  bench_device_close(&device);
  return status;
}
