/* Input that is not finite, or too large: every rank skips the call, nothing changes, and the next
 * call succeeds, on a device as on the host. Large numbers below the limit cause no skip. */
#include <string.h>

#include "tests/gpu/plans.h"

/* Four is the least number of ranks whose messages to all are passed on in rounds. */
enum { CALLS = 6, KINDS = 7, SIZE = 4 };

/* Magnitudes of the input: a usual one, one above the limit for safe sums, and one whose squares
 * overflow in float32. */
static const float magnitudes[] = {1, 1e12f, 3e19f};
enum { MAGNITUDES = sizeof magnitudes / sizeof magnitudes[0] };

struct record {
  onebit_status_t status[CALLS];
  struct traces traces[CALLS];
};

struct table {
  struct record records[KINDS][MAGNITUDES][SIZE];
};

static bool equal_except_input(const struct traces *a, const struct traces *b) {
  return a->result == b->result && a->worker == b->worker && a->server == b->server;
}

/* In every second call one rank's input is not finite, each rank in turn. */
static void run_case(onebit_comm_t comm, const struct plan_case *what, bool device,
                     cudaStream_t stream, struct record *record) {
  struct part part;
  if (!part_create(&part, comm, what, device))
    return;
  for (int i = 0; i < CALLS; i++) {
    part_write_input(&part, (unsigned)i, i % 2 == 1 && part.rank == i % part.size);
    part_load(&part);
    if (device)
      CHECK_CUDA(cudaStreamSynchronize(NULL));
    record->status[i] =
        device && i % 4 < 2 ? part_enqueue_and_wait(&part, stream) : part_call(&part);
    record->traces[i] = part_hash_traces(&part);
    if (i % 2 == 1) {
      CHECK(record->status[i] == ONEBIT_SKIPPED, "call %d: status %d: %s", i, record->status[i],
            onebit_last_error());
      CHECK(equal_except_input(&record->traces[i], &record->traces[i - 1]),
            "call %d changed something", i);
    }
  }
  part_destroy(&part);
}

static void run_cases(const struct gpu_rank *self, struct table *table, bool device) {
  cudaStream_t stream;
  char words[160];
  CHECK_CUDA(cudaStreamCreate(&stream));
  for (size_t kind = 0; kind < KINDS; kind++)
    for (size_t m = 0; m < MAGNITUDES; m++) {
      struct plan_case what = plan_case_at(kind);
      struct record *expected = &table->records[kind][m][self->rank], got;
      memset(&got, 0, sizeof got);
      what.count = 1000;
      what.magnitude = magnitudes[m];
      check_case("rank %d, times %g, %s", self->rank, (double)magnitudes[m],
                 describe_plan_case(&what, words, sizeof words));
      run_case(self->comm, &what, device, stream, device ? &got : expected);
      for (int i = 0; device && i < CALLS; i++) {
        CHECK(got.status[i] == expected->status[i], "call %d: status %d, on the host %d", i,
              got.status[i], expected->status[i]);
        CHECK(equal_except_input(&got.traces[i], &expected->traces[i]), "call %d: other bits", i);
      }
    }
  CHECK_CUDA(cudaStreamDestroy(stream));
}

static void run_on_host(const struct gpu_rank *self, void *context) {
  run_cases(self, context, false);
}

static void run_on_device(const struct gpu_rank *self, void *context) {
  run_cases(self, context, true);
}

static void compare_with_host(int size, plan_ranks *ranks) {
  struct table *table = gpu_allocate_area(sizeof *table);
  gpu_run_loopback(size, run_on_host, table);
  ranks(size, run_on_device, table);
}

static void skips_over_loopback(void) { compare_with_host(SIZE, gpu_run_loopback); }

static void skips_alone(void) { compare_with_host(1, run_ranks_self); }

/* --- Several calls before their status is read */

static void enqueue_nonfinite(struct part *part, unsigned step) {
  part_write_input(part, step, part->rank == 0);
  part_load(part);
  CHECK_CUDA(cudaStreamSynchronize(NULL));
  CHECK_STATUS(part_enqueue(part, NULL), ONEBIT_OK);
}

/* Two skips and an error of rank 0: the error is returned; the other ranks' message names rank 0.
 * Later calls succeed. */
static void check_error_after_skips(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part;
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, 1000);
  if (!part_create(&part, self->comm, &what, true))
    return;
  enqueue_nonfinite(&part, 0);
  enqueue_nonfinite(&part, 1);
  CHECK_STATUS(onebit_plan_synchronize(part.plan), ONEBIT_SKIPPED);
  enqueue_nonfinite(&part, 2);
  void *out = part.out;
  part.out = self->rank == 0 ? NULL : out;
  CHECK_STATUS(part_enqueue(&part, NULL), self->rank == 0 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_OK);
  part.out = out;
  enqueue_nonfinite(&part, 3);
  CHECK_STATUS(onebit_plan_synchronize(part.plan),
               self->rank == 0 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  if (self->rank != 0)
    CHECK(strstr(onebit_last_error(), "rank 0"), "words: %s", onebit_last_error());
  CHECK_STATUS(onebit_plan_synchronize(part.plan), ONEBIT_OK);
  part_write_input(&part, 4, false);
  part_load(&part);
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  part_destroy(&part);
}

static void error_outranks_skips_alone(void) { run_ranks_self(1, check_error_after_skips, NULL); }

#ifdef ONEBIT_HAVE_NCCL
static void skips_over_nccl(void) { compare_with_host(SIZE, run_ranks_nccl); }

static void error_outranks_skips_over_nccl(void) {
  run_ranks_nccl(3, check_error_after_skips, NULL);
}
#endif

#ifdef ONEBIT_EMULATED_CUDA
static void skips_over_device_transport(void) { compare_with_host(SIZE, run_ranks_aware); }

static void error_outranks_skips_over_device_transport(void) {
  run_ranks_aware(3, check_error_after_skips, NULL);
}
#endif

static const struct gpu_test tests[] = {
    {"over loopback as on the host", skips_over_loopback, false},
#ifdef ONEBIT_EMULATED_CUDA
    {"over a transport of device memory", skips_over_device_transport, false},
    {"an error counts more, over that", error_outranks_skips_over_device_transport, false},
#endif
    {"a rank alone as on the host", skips_alone, false},
    {"an error counts more, a rank alone", error_outranks_skips_alone, false},
#ifdef ONEBIT_HAVE_NCCL
    {"over NCCL as on the host", skips_over_nccl, false},
    {"an error counts more, over NCCL", error_outranks_skips_over_nccl, false},
#endif
};
GPU_SUITE("skips", tests)
