/*
 * Compares every bit of every collective with the oracle: the results of several steps, and the
 * residuals afterwards. Covers the group sizes, counts, types, scales and block sizes that the
 * library promises, in place and with separate buffers, blocking and nonblocking.
 *
 * Groups of 1 to 3 ranks run every combination of operation, count up to 4097, dtype, scale and
 * block size. Larger groups, and cases of 100,003 elements, run a subset that has every block size
 * with every scale. Message sizes, threads, codecs, placement of the buffers, and blocking or
 * nonblocking calls vary from case to case.
 */

#define TEST_SECONDS 600
#include "tests/support_collectives.h"

/* Checks a case with one of the codecs that can run here. Successive cases use different codecs. */
static void check_with_next_codec(struct collective_run *run, size_t number) {
  size_t k = 0;
  while (k < test_codecs_count && !use_codec(test_codecs[(number + k) % test_codecs_count]))
    k++;
  cr_assert(k < test_codecs_count, "no codec is usable");
  on_hosts(run->what.size, run->what.hosts, collective_on_rank, run);
}

static void check_group(int size, enum extent extent) {
  size_t count;
  struct collective_case *cases = collective_cases(size, extent, &count);
  collective_check_sample("collectives", 1, cases, count, check_with_next_codec);
}

Test(collectives, one_rank) { check_group(1, EVERY_OPTION); }
Test(collectives, two_ranks) { check_group(2, EVERY_OPTION); }
Test(collectives, three_ranks) { check_group(3, EVERY_OPTION); }
Test(collectives, four_ranks) { check_group(4, COVERING); }
Test(collectives, seven_ranks) { check_group(7, COVERING); }
Test(collectives, eight_ranks) { check_group(8, COVERING); }
Test(collectives, sixteen_ranks) { check_group(16, COVERING); }

/* Checks the same case with every codec against the oracle. */
static void check_with_every_codec(struct collective_run *run, size_t number) {
  (void)number;
  for (size_t c = 0; c < test_codecs_count; c++)
    if (use_codec(test_codecs[c]))
      on_ranks(2, collective_on_rank, run);
}

Test(collectives, every_codec_and_any_number_of_threads) {
  size_t count;
  struct collective_case *cases = collective_cases(2, COVERING, &count);
  struct collective_case *all = allocate(3 * count, sizeof *all);
  for (size_t k = 0; k < 3 * count; k++) {
    all[k] = cases[k / 3];
    all[k].options.threads = 1 + (int)(k % 3);
  }
  free(cases);
  collective_check_sample("codecs", 5, all, 3 * count, check_with_every_codec);
}

/* A communicator of onebit_comm_create_self is a group of one rank. */
static void check_on_self(struct collective_run *run, size_t number) {
  (void)number;
  onebit_comm_t comm = self_comm();
  collective_on_rank(comm, run);
  onebit_comm_destroy(comm);
  checks_must_hold();
}

Test(collectives, self_is_a_group_of_one) {
  size_t count;
  struct collective_case *cases = collective_cases(1, COVERING, &count);
  collective_check_sample("self", 3, cases, count, check_on_self);
}

/* Checks the size of the group, and that a plan's info is correct. */
static void check_plan_info(onebit_comm_t comm, void *context) {
  const int *size = context;
  onebit_plan_t plan;
  onebit_plan_options_t options = {.size = sizeof options, .block_size = 256};
  CHECK(onebit_comm_size(comm) == *size, "size %d", onebit_comm_size(comm));
  if (!CHECK_STATUS(onebit_plan_create(comm, 1000, &options, &plan), ONEBIT_OK))
    return;
  const onebit_plan_info_t info = plan_info(plan);
  CHECK(info.block_size == 256, "block size %zu", info.block_size);
  CHECK(info.transport && info.transport[0] == 'l', "transport %s", info.transport);
  CHECK(info.codec && info.codec[0], "codec without a name");
  CHECK(info.memory_bytes >= 8 * 1000, "memory of %llu bytes",
        (unsigned long long)info.memory_bytes);
  float values[1000] = {0};
  uint64_t before = onebit_comm_bytes_sent(comm);
  CHECK_STATUS(onebit_allreduce(values, values, plan), ONEBIT_OK);
  uint64_t sent = onebit_comm_bytes_sent(comm) - before;
  CHECK(sent == info.wire_bytes, "%llu bytes sent, %llu announced", (unsigned long long)sent,
        (unsigned long long)info.wire_bytes);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

Test(collectives, plans_tell_what_they_decided) {
  for (int size = 2; size <= 4; size++)
    on_ranks(size, check_plan_info, &size);
}

/* Checks all schedules of an allreduce other than the exchange. */
static void check_schedules(int size, int hosts) {
  size_t count;
  struct collective_case *cases = schedule_cases(size, hosts, COVERING, &count);
  collective_check_sample("schedules", 1, cases, count, check_with_next_codec);
}

Test(collectives, schedules_on_one_rank) { check_schedules(1, 1); }
Test(collectives, schedules_on_two_ranks) {
  check_schedules(2, 1);
  check_schedules(2, 2);
}
Test(collectives, schedules_on_several_hosts) {
  check_schedules(3, 3);
  check_schedules(4, 2);
  check_schedules(6, 2);
  check_schedules(6, 3);
  check_schedules(8, 4);
}
Test(collectives, schedules_on_one_host) { check_schedules(4, 1); }
