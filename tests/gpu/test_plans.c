/*
 * Tests plans on a device. For all options and all kinds of call, results, residuals and the plan's
 * info must have the same bits as on the host over loopback. If an input is not finite, or so large
 * that squares overflow, every rank must skip the call, nothing may change, and the next call must
 * succeed. Numbers below that limit must not cause a skip.
 *
 * A run tests one in 83 combinations of options, or one in 919 on the emulated device.
 * ONEBIT_TEST_SHARE=N runs one Nth of these cases. Every pair of options occurs.
 */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/plans.h"

enum { CALLS = 5, NOT_FINITE = 1, MOST_SIZE = 5, THINNER = IS_EMULATED ? 919 : 83 };

/* The result of a case on one rank: the hash of the plan's info, and each call's status and
 * traces. */
struct record {
  uint64_t account;
  onebit_status_t status[CALLS];
  struct traces calls[CALLS];
};

struct walk {
  struct record *records; /* expected results, for each case and rank */
  struct sample sample;
};

/* The limit for inputs: squares of larger inputs may overflow. */
#define LARGE 1e18f

static bool traces_equal_but_input(const struct traces *a, const struct traces *b) {
  return a->result == b->result && a->worker == b->worker && a->server == b->server;
}

/* Makes a call on a stream, a blocking call, or a request, in turn by the call's number. */
static onebit_status_t make_call(struct part *part, unsigned number, cudaStream_t stream) {
  onebit_request_t request;
  if (number % 3 == 0 && part->device)
    return part_enqueue_and_wait(part, stream);
  if (number % 3 != 2)
    return part_call(part);
  onebit_status_t status = part_start(part, &request);
  if (status != ONEBIT_OK)
    return status;
  while ((status = onebit_test(&request)) == ONEBIT_IN_PROGRESS)
    ;
  return status;
}

static void run_case(onebit_comm_t comm, const struct plan_case *what, bool device,
                     cudaStream_t stream, struct record *record) {
  struct part part;
  if (!part_create(&part, comm, what, device))
    return;
  record->account = part_hash_info(&part);
  for (unsigned number = 0; number < CALLS; number++) {
    part_load_input(&part, number,
                    number == NOT_FINITE && part.rank == (int)(what->salt % (unsigned)part.size));
    if (number == 3)
      part_scale_errors(&part, -0.5f);
    if (number == 4)
      CHECK_STATUS(onebit_plan_reset_residual(part.plan), ONEBIT_OK);
    const onebit_status_t status = make_call(&part, number, stream);
    const bool skipped = number == NOT_FINITE && what->count > 0;
    CHECK(status == (skipped ? ONEBIT_SKIPPED : ONEBIT_OK) ||
              (status == ONEBIT_SKIPPED && what->magnitude > LARGE),
          "call %u: status %d: %s", number, (int)status, onebit_last_error());
    record->status[number] = status;
    record->calls[number] = part_hash_traces(&part);
    if (skipped && !what->in_place)
      CHECK(traces_equal_but_input(&record->calls[number], &record->calls[number - 1]),
            "call %u changed something", number);
  }
  part_destroy(&part);
}

static void compare_records(const struct record *got, const struct record *wanted) {
  CHECK(got->account == wanted->account, "the plan's account of itself differs from the host's");
  for (unsigned i = 0; i < CALLS; i++) {
    const struct traces *a = &got->calls[i], *b = &wanted->calls[i];
    CHECK(got->status[i] == wanted->status[i], "call %u: status %d, on the host %d", i,
          (int)got->status[i], (int)wanted->status[i]);
    CHECK(a->result == b->result, "the result of call %u differs", i);
    CHECK(a->input == b->input, "the input of call %u was changed", i);
    CHECK(a->worker == b->worker, "the worker residual after call %u differs", i);
    CHECK(a->server == b->server, "the server residual after call %u differs", i);
  }
}

static void run_cases(const struct gpu_rank *self, const struct walk *walk, bool device,
                      bool expect) {
  cudaStream_t stream;
  char words[200];
  CHECK_CUDA(cudaStreamCreate(&stream));
  for (size_t i = 0; i < walk->sample.count; i++) {
    struct plan_case what = plan_case_at(walk->sample.rows[i]);
    struct record *expected = &walk->records[i * MOST_SIZE + (size_t)self->rank];
    struct record got = {0};
    check_case("rank %d of %d, %s", self->rank, self->size,
               describe_plan_case(&what, words, sizeof words));
    run_case(self->comm, &what, device, stream, expect ? expected : &got);
    if (!expect)
      compare_records(&got, expected);
  }
  CHECK_CUDA(cudaStreamDestroy(stream));
}

static void run_on_host(const struct gpu_rank *self, void *context) {
  run_cases(self, context, false, true);
}

static void run_on_device(const struct gpu_rank *self, void *context) {
  run_cases(self, context, true, false);
}

static void run_odd_ranks_on_device(const struct gpu_rank *self, void *context) {
  run_cases(self, context, self->rank % 2 == 1, false);
}

/* Runs cases on the host, runs the same cases with `body` on ranks made by `ranks`, and compares
 * the results. Each group size has other cases. */
static void run_group(int size, plan_ranks *ranks, gpu_rank_body *body) {
  char name[16];
  snprintf(name, sizeof name, "plans-%d", size);
  struct walk walk = {.sample = sample_plan_cases(name, THINNER)};
  walk.records = gpu_allocate_area(walk.sample.count * MOST_SIZE * sizeof *walk.records);
  gpu_run_loopback(size, run_on_host, &walk);
  ranks(size, body, &walk);
  free(walk.sample.rows);
}

static void plans_over_loopback(void) {
  for (int size = 1; size <= MOST_SIZE; size++)
    run_group(size, gpu_run_loopback, run_on_device);
}

static void plans_on_hosts_and_devices(void) {
  for (int size = 2; size <= MOST_SIZE; size++)
    run_group(size, gpu_run_loopback, run_odd_ranks_on_device);
}

/* Checks the number of messages when only some ranks are on a device. For this size a plan on a
 * device would choose one message, and a plan on the host two. All ranks must use two. */
static void create_mixed_plans(const struct gpu_rank *self, void *context) {
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, 200000);
  struct part part;
  (void)context;
  if (!part_create(&part, self->comm, &what, self->rank == 1))
    return;
  CHECK(part.info.chunks == 2, "%zu messages", part.info.chunks);
  part_load_input(&part, 0, false);
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  part_destroy(&part);
}

static void mixed_plans_have_equal_chunks(void) { gpu_run_loopback(2, create_mixed_plans, NULL); }

static void plans_alone(void) { run_group(1, run_ranks_self, run_on_device); }

static void plans_over_nccl(void) {
  for (int size = 2; size <= MOST_SIZE; size++)
    run_group(size, run_ranks_nccl, run_on_device);
}

static void plans_over_device_transport(void) {
  for (int size = 1; size <= MOST_SIZE; size++)
    run_group(size, run_ranks_aware, run_on_device);
}

static void plans_over_both_transports(void) {
  for (int size = 2; size <= MOST_SIZE; size++)
    run_group(size, run_ranks_aware, run_odd_ranks_on_device);
}

/* Tests buffers whose rows are too far apart for one strided copy (2 GiB on today's devices). The
 * library must copy such rows one by one. */
static void call_far_apart(const struct gpu_rank *self, const struct hosts_split *split,
                           enum hosts_place place, void *context) {
  struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, 4099);
  struct part parts[2];
  (void)split, (void)context;
  for (int kind = 0; place == STAGED && kind < 2; kind++) {
    what.options.schedule = kind ? ONEBIT_SCHEDULE_HIERARCHICAL : ONEBIT_SCHEDULE_EXCHANGE;
    for (int k = 0; k < 2; k++) {
      if (!part_create(&parts[k], self->comm, &what, k == 1))
        return;
      part_load_input(&parts[k], 0, false);
      CHECK_STATUS(part_call(&parts[k]), ONEBIT_OK);
    }
    const struct traces host = part_hash_traces(&parts[0]), device = part_hash_traces(&parts[1]);
    CHECK(traces_equal(&host, &device), "other bits, kind %d", kind);
    part_destroy(&parts[0]);
    part_destroy(&parts[1]);
  }
}

static void rows_far_apart(void) {
  setenv("EMULATED_PITCH", "64", 1);
  run_on_hosts(&hosts_splits[0], call_far_apart, NULL);
  unsetenv("EMULATED_PITCH");
}

static const struct gpu_test tests[] = {
    {"over loopback as on the host", plans_over_loopback, ANY_DEVICE},
    {"over a transport of device memory", plans_over_device_transport, EMULATED},
    {"hosts and such devices in one job", plans_over_both_transports, EMULATED},
    {"rows far apart", rows_far_apart, EMULATED},
    {"hosts and devices in one job", plans_on_hosts_and_devices, ANY_DEVICE},
    {"such a job cuts its messages as hosts do", mixed_plans_have_equal_chunks, ANY_DEVICE},
    {"a rank alone as on the host", plans_alone, ANY_DEVICE},
    {"over NCCL as on the host", plans_over_nccl, ANY_DEVICE},
};
GPU_SUITE("plans", tests)
