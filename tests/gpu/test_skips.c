/* Input that is not finite, or too large: every rank skips the call, nothing changes, and the next
 * call succeeds, on a device as on the host. Large numbers below the limit cause no skip. */
#include <string.h>

#include "tests/gpu/plans.h"

/* From four ranks on, messages of each rank to all are passed on in rounds. */
enum { CALLS = 6, KINDS = 7, SIZE = 4 };

/* The last: squares of float32 overflow. The middle one is beyond what a sum is safe of. */
static const float magnitudes[] = {1, 1e12f, 3e19f};
enum { MAGNITUDES = sizeof magnitudes / sizeof magnitudes[0] };

struct record {
  onebit_status_t status[CALLS];
  struct traces traces[CALLS];
};

struct table {
  struct record records[KINDS][MAGNITUDES][SIZE];
};

static bool same_but_input(const struct traces *a, const struct traces *b) {
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
      CHECK(same_but_input(&record->traces[i], &record->traces[i - 1]), "call %d changed something",
            i);
    }
  }
  part_destroy(&part);
}

static void walk(const struct gpu_rank *self, struct table *table, bool device) {
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
        CHECK(same_but_input(&got.traces[i], &expected->traces[i]), "call %d: other bits", i);
      }
    }
  CHECK_CUDA(cudaStreamDestroy(stream));
}

static void on_host(const struct gpu_rank *self, void *context) { walk(self, context, false); }

static void on_device(const struct gpu_rank *self, void *context) { walk(self, context, true); }

static void as_on_host(int size, plan_ranks *ranks) {
  struct table *table = gpu_allocate_area(sizeof *table);
  gpu_run_loopback(size, on_host, table);
  ranks(size, on_device, table);
}

static void loopback(void) { as_on_host(SIZE, gpu_run_loopback); }

static void alone(void) { as_on_host(1, run_ranks_self); }

/* --- Several calls before somebody asks */

static void put_spoilt(struct part *part, unsigned step) {
  part_write_input(part, step, part->rank == 0);
  part_load(part);
  CHECK_CUDA(cudaStreamSynchronize(NULL));
  CHECK_STATUS(part_enqueue(part, NULL), ONEBIT_OK);
}

/* Two skips and an error of rank 0: the error is returned; the other ranks' message names rank 0.
 * Later calls succeed. */
static void error_after_skips(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part;
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, 1000);
  if (!part_create(&part, self->comm, &what, true))
    return;
  put_spoilt(&part, 0);
  put_spoilt(&part, 1);
  CHECK_STATUS(onebit_plan_synchronize(part.plan), ONEBIT_SKIPPED);
  put_spoilt(&part, 2);
  void *out = part.out;
  part.out = self->rank == 0 ? NULL : out;
  CHECK_STATUS(part_enqueue(&part, NULL), self->rank == 0 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_OK);
  part.out = out;
  put_spoilt(&part, 3);
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

static void told_once_alone(void) { run_ranks_self(1, error_after_skips, NULL); }

#ifdef ONEBIT_HAVE_NCCL
static void nccl(void) { as_on_host(SIZE, run_ranks_nccl); }

static void told_once(void) { run_ranks_nccl(3, error_after_skips, NULL); }
#endif

#ifdef ONEBIT_EMULATED_CUDA
static void aware(void) { as_on_host(SIZE, run_ranks_aware); }

static void told_once_aware(void) { run_ranks_aware(3, error_after_skips, NULL); }
#endif

static const struct gpu_test tests[] = {
    {"over loopback as on the host", loopback, false},
#ifdef ONEBIT_EMULATED_CUDA
    {"over a transport of device memory", aware, false},
    {"an error counts more, over that", told_once_aware, false},
#endif
    {"a rank alone as on the host", alone, false},
    {"an error counts more, a rank alone", told_once_alone, false},
#ifdef ONEBIT_HAVE_NCCL
    {"over NCCL as on the host", nccl, false},
    {"an error counts more, over NCCL", told_once, false},
#endif
};
GPU_SUITE("skips", tests)
