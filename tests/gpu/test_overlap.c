/*
 * Messages beside kernels, by count: the longest chain of a call's graph is its kernels, and where
 * there are several chunks no message is part of it.
 */
#define _DEFAULT_SOURCE
#include "collectives/plan_private.h"
#include "cuda/device.h"
#include "tests/gpu/plans.h"

#if defined ONEBIT_EMULATED_CUDA && defined ONEBIT_HAVE_NCCL
#include <emulation.h>

enum { RANKS = 3, KINDS = 7, CHUNKS = 4, BLOCK = 32 };

/* Nodes of the call's graph that are beside the longest chain. */
static long count_beside(struct part *part) {
  cudaStream_t stream;
  cudaGraph_t graph = NULL;
  size_t nodes = 0;
  long chain = 0;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK_STATUS(part_put(part, stream), ONEBIT_OK);
  if (CHECK_CUDA(cudaStreamEndCapture(stream, &graph))) {
    CHECK_CUDA(cudaGraphGetNodes(graph, NULL, &nodes));
    chain = emulation_longest_chain(graph);
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
  CHECK_CUDA(cudaStreamDestroy(stream));
  return (long)nodes - chain;
}

static void count_kind(const struct gpu_rank *self, size_t kind, size_t chunks) {
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
             plan_case_words(&what, words, sizeof words));
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

static void count_kinds(const struct gpu_rank *self, void *context) {
  (void)context;
  for (size_t kind = 0; kind < KINDS; kind++) {
    count_kind(self, kind, 1);
    count_kind(self, kind, CHUNKS);
  }
}

/* An optimizer's dense window. */
static void count_window(const struct gpu_rank *self, void *context) {
  const struct plan_case what = plan_case_simple(ONEBIT_ALLREDUCE, 2048 * CHUNKS * RANKS);
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
    CHECK(beside == 2 * CHUNKS, "%ld messages are beside the kernels", beside);
  }
  part_destroy(&part);
}

static void windows(void) { ranks_nccl(RANKS, count_window, NULL); }

static void graphs(void) { ranks_nccl(RANKS, count_kinds, NULL); }

#else

static void graphs(void) { SKIP("only an emulated device tells what a graph's nodes wait for"); }

#define windows graphs

#endif

static const struct gpu_test tests[] = {
    {"in a graph over NCCL", graphs, false},
    {"in the graph of a window", windows, false},
};
GPU_SUITE("overlap", tests)
