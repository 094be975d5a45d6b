/*
 * Tests the costs of a call besides its arithmetic: the number of kernels and copies that it
 * launches. A call must not allocate memory. If the device runs all steps, the host must not wait.
 * Messages must overlap with kernels: with several chunks, the longest chain in a call's graph
 * contains no message. Only the emulated device counts.
 */
#include <stdio.h>
#include <string.h>

#include "collectives/plan_private.h"
#include "cuda/device.h"
#include "tests/gpu/plans.h"

enum { KINDS = 7, CHUNKS = 3 };

/* A rank's launches in a call with one message to each rank, and the launches that each further
 * message adds. */
struct cost {
  long kernels, copies, more_kernels, more_copies;
};

static onebit_status_t call_on_stream(void *part) { return part_enqueue(part, NULL); }

static struct emulation_counters count_part(struct part *part, bool waits) {
  part_load_input(part, 0, false);
  CHECK_CUDA(cudaDeviceSynchronize());
  const struct emulation_counters counts = count_call(call_on_stream, part);
  CHECK(counts.allocations == 0, "%ld allocations in a call", counts.allocations);
  CHECK(waits || counts.synchronisations == 0, "the host waited %ld times",
        counts.synchronisations);
  CHECK_STATUS(onebit_plan_synchronize(part->plan), ONEBIT_OK);
  return counts;
}

static struct emulation_counters count_case(onebit_comm_t comm, size_t kind, size_t chunks) {
  struct emulation_counters counts = {0};
  struct plan_case what = plan_case_at(kind);
  struct part part;
  const bool shares = what.options.operation == ONEBIT_ALLREDUCE &&
                      what.options.schedule != ONEBIT_SCHEDULE_ALLGATHER;
  what.options.block_size = 0;
  what.options.chunk_size = 2048;
  what.count = 2048 * chunks * (shares ? (size_t)onebit_comm_size(comm) : 1);
  what.count -= 100; /* 100 fewer, so that the padding of profile deepspeed adds no message */
  if (!part_create(&part, comm, &what, true))
    return counts;
  CHECK(part.info.chunks == chunks, "%zu messages, not %zu", part.info.chunks, chunks);
  counts = count_part(&part, part.info.transport[0] == 'l');
  part_destroy(&part);
  return counts;
}

static void check_costs(const struct gpu_rank *self, void *context) {
  const struct cost *costs = context;
  char words[160];
  for (size_t kind = 0; kind < KINDS; kind++) {
    struct plan_case what = plan_case_at(kind);
    const struct cost *wanted = &costs[kind];
    check_case("%s", describe_plan_case(&what, words, sizeof words));
    const struct emulation_counters one = count_case(self->comm, kind, 1);
    const struct emulation_counters many = count_case(self->comm, kind, CHUNKS);
    const struct cost got = {one.kernels / self->size, one.copies / self->size,
                             (many.kernels - one.kernels) / self->size / (CHUNKS - 1),
                             (many.copies - one.copies) / self->size / (CHUNKS - 1)};
    CHECK(got.kernels == wanted->kernels && got.copies == wanted->copies &&
              got.more_kernels == wanted->more_kernels && got.more_copies == wanted->more_copies,
          "%ld kernels and %ld copies, and %ld and %ld for each message more; not %ld, %ld, %ld, "
          "%ld",
          got.kernels, got.copies, got.more_kernels, got.more_copies, wanted->kernels,
          wanted->copies, wanted->more_kernels, wanted->more_copies);
    if (self->rank == 0)
      printf("  %-30.*s %3ld kernels %3ld copies; a message more: %2ld, %2ld\n",
             (int)(strstr(words, " of ") - words), words, got.kernels, got.copies, got.more_kernels,
             got.more_copies);
  }
}

/* The launches for each kind of plan_case_at. A call launches the kernels compress (also seals
 * messages), reduce (also checks and seals messages), open (also decides whether results are
 * applied), apply and conclude, and a copy of the state. A kind leaves out kernels that it does not
 * need. With one scale for all blocks, the kernels finish and seal follow both compress and reduce.
 * Dense calls seal, open and decide in separate kernels. */
static struct cost on_a_stream[KINDS] = {{5, 1, 4, 0}, {4, 1, 3, 0}, {9, 1, 6, 0}, {8, 1, 7, 0},
                                         {7, 1, 5, 0}, {4, 1, 3, 0}, {4, 1, 3, 0}};

static void costs_over_nccl(void) { run_ranks_nccl(3, check_costs, on_a_stream); }

/* Over a transport that sends device memory, the host waits only before it sends a message. */
static void costs_over_device_transport(void) { run_ranks_aware(3, check_costs, on_a_stream); }

/* A single rank has no messages to open, so a separate kernel decides whether results are
 * applied. */
static void costs_alone(void) {
  struct cost costs[KINDS] = {{5, 1, 3, 0}, {4, 1, 2, 0}, {9, 1, 5, 0}, {7, 1, 5, 0},
                              {6, 1, 4, 0}, {4, 1, 2, 0}, {4, 1, 2, 0}};
  run_ranks_self(1, check_costs, costs);
}

/* Over loopback the host reads the message headers. Each message is copied to the host and back,
 * and the state is copied after each message. */
static void costs_over_loopback(void) {
  struct cost costs[KINDS] = {{5, 6, 3, 6}, {4, 3, 2, 3}, {7, 9, 3, 7}, {4, 6, 3, 6},
                              {4, 4, 3, 4}, {4, 3, 2, 3}, {4, 3, 2, 3}};
  gpu_run_loopback(3, check_costs, costs);
}

/* --- Messages that overlap with kernels */

enum { RANKS = 3, MESSAGES = 4, BLOCK = 32 };

/* Returns the number of nodes in the call's graph that are not in the longest chain of nodes. */
static long count_beside(struct part *part) {
  cudaStream_t stream;
  cudaGraph_t graph = NULL;
  size_t nodes = 0;
  long chain = 0;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK_STATUS(part_enqueue(part, stream), ONEBIT_OK);
  if (CHECK_CUDA(cudaStreamEndCapture(stream, &graph))) {
    CHECK_CUDA(cudaGraphGetNodes(graph, NULL, &nodes));
    chain = emulation_longest_chain(graph);
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
  CHECK_CUDA(cudaStreamDestroy(stream));
  return (long)nodes - chain;
}

static void check_overlap(const struct gpu_rank *self, size_t kind, size_t chunks) {
  struct plan_case what = plan_case_at(kind);
  const onebit_plan_options_t *options = &what.options;
  const bool two_phases =
      options->operation == ONEBIT_ALLREDUCE && options->schedule != ONEBIT_SCHEDULE_ALLGATHER;
  struct part part;
  char words[160];
  what.options.chunk_size = 2048;
  what.options.block_size = options->profile == ONEBIT_PROFILE_DEEPSPEED ? 0 : BLOCK;
  what.count = 2048 * chunks * (two_phases ? RANKS : 1) - 100;
  check_case("rank %d, %zu chunks, %s", self->rank, chunks,
             describe_plan_case(&what, words, sizeof words));
  if (!part_create(&part, self->comm, &what, true))
    return;
  CHECK(part.info.chunks == chunks, "%zu chunks", part.info.chunks);
  CHECK(chunks == 1 ||
            part.plan->device->overlap.stream == self->comm->transport->stream(self->comm),
        "the plan has a stream of its own for messages");
  const long groups = chunks == 1 ? 0 : (long)chunks * (two_phases ? 2 : 1);
  const long beside = count_beside(&part);
  CHECK(beside == groups, "%ld messages are beside the kernels, not %ld", beside, groups);
  part_destroy(&part);
}

static void check_overlaps(const struct gpu_rank *self, void *context) {
  (void)context;
  for (size_t kind = 0; kind < KINDS; kind++) {
    check_overlap(self, kind, 1);
    check_overlap(self, kind, MESSAGES);
  }
}

/* Checks the overlap of messages with kernels in a dense plan whose buffer is an NCCL window.
 * Optimizers create such plans. */
static void check_window_overlap(const struct gpu_rank *self, void *context) {
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, 2048 * MESSAGES * RANKS);
  onebit_plan_options_t options = what.options;
  struct ob_plan_shape shape;
  size_t counts[RANKS], valid[RANKS];
  struct part part;
  (void)context;
  check_case("rank %d, a window", self->rank);
  options.device = ONEBIT_DEVICE_CUDA;
  options.wire = ONEBIT_WIRE_DENSE;
  options.chunk_size = 2048;
  if (!part_create(&part, self->comm, &what, true))
    return;
  CHECK_STATUS(onebit_plan_destroy(part.plan), ONEBIT_OK);
  CHECK_STATUS(ob_plan_resolve(&options, &shape), ONEBIT_OK);
  shape.windowed = true;
  ob_plan_cut(&shape, RANKS, what.count, counts, valid);
  if (CHECK_STATUS(ob_plan_create(self->comm, ONEBIT_OK, &shape, what.count, &part.plan),
                   ONEBIT_OK)) {
    const long beside = count_beside(&part);
    CHECK(beside == 2 * MESSAGES, "%ld messages are beside the kernels", beside);
  }
  part_destroy(&part);
}

static void overlap_in_window(void) { run_ranks_nccl(RANKS, check_window_overlap, NULL); }

static void overlap_in_graphs(void) { run_ranks_nccl(RANKS, check_overlaps, NULL); }

static const struct gpu_test tests[] = {
    {"of a call alone", costs_alone, EMULATED},
    {"of a call over NCCL", costs_over_nccl, EMULATED},
    {"of a call over loopback", costs_over_loopback, EMULATED},
    {"of a call over a transport of device memory", costs_over_device_transport, EMULATED},
    {"beside the kernels in a graph over NCCL", overlap_in_graphs, EMULATED},
    {"beside the kernels in the graph of a window", overlap_in_window, EMULATED},
};
GPU_SUITE("counts", tests)
