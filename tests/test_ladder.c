/* Tests plans that change their width, the bits per element. A plan for which one bit is not enough
 * raises its width by itself, and lowers it again; another plan keeps its width. All ranks change
 * the width in the same call, in every schedule, and no part of the residual is lost. */

#include "collectives/ladder.h"
#include "collectives/plan_private.h"
#include "tests/support_collectives.h"

enum { COUNT = LADDER_COUNT, WINDOW = LADDER_WINDOW };

Test(ladder, climbs_and_descends) {
  static const struct {
    int size, hosts;
    onebit_operation_t operation;
    onebit_schedule_t schedule;
  } rows[] = {
      {1, 1, ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE},
      {2, 1, ONEBIT_ALLGATHER, ONEBIT_SCHEDULE_AUTOMATIC},
      {2, 1, ONEBIT_REDUCE_SCATTER, ONEBIT_SCHEDULE_AUTOMATIC},
      {3, 1, ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE},
      {2, 1, ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_ALLGATHER},
      {4, 1, ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_ALLGATHER}, /* in pairs */
      {5, 1, ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_ALLGATHER}, /* in rounds */
      {4, 2, ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_HIERARCHICAL},
  };
  for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
    struct climb climb = {.operation = rows[k].operation, .schedule = rows[k].schedule};
    if (!test_wanted(k))
      continue;
    check_case("%d ranks on %d hosts, %s, schedule %d", rows[k].size, rows[k].hosts,
               operation_name(rows[k].operation), (int)rows[k].schedule);
    on_hosts(rows[k].size, rows[k].hosts, climb_on_rank, &climb);
  }
}

/* --- Decisions of the ladder -------------------------------------------------------------------*/

/* Runs `count` windows. At the end of each, all ranks must have sent the same flags. */
static void end_windows(onebit_plan_t plan, int count, unsigned flags, unsigned bits) {
  for (int k = 0; k < count; k++) {
    plan->state->ladder.state.voting = true;
    plan->state->ladder.flags = flags;
    ob_ladder_commit(plan);
    ob_ladder_apply_width(plan);
  }
  CHECK(plan->geometry.width == bits, "%d windows of %u: %u bits, not %u", count, flags,
        plan->geometry.width, bits);
}

static void decides_on_rank(onebit_comm_t comm, void *context) {
  const struct climb climb = {ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE};
  onebit_plan_t plan = ladder_plan(comm, &climb, 1);
  (void)context;
  if (!plan)
    return;
  end_windows(plan, 1, OB_FLAG_CLIMB, 2);
  end_windows(plan, 2, OB_FLAG_CLIMB, 2); /* the values that the residual has held back are sent */
  end_windows(plan, 1, OB_FLAG_CLIMB, 4);
  end_windows(plan, 2 + 3, 0, 4);
  end_windows(plan, 5, OB_FLAG_STAY, 4);
  end_windows(plan, 3, 0, 4);
  end_windows(plan, 1, 0, 2);
  for (int patience = 8; patience <= 128; patience *= 2) { /* patience doubles, up to 64 */
    end_windows(plan, 2, 0, 2);
    end_windows(plan, 1, OB_FLAG_CLIMB, 4);
    end_windows(plan, 2 + (patience < 64 ? patience : 64) - 1, 0, 4);
    end_windows(plan, 1, 0, 2);
  }
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

Test(ladder, decides_as_documented) { on_ranks(1, decides_on_rank, NULL); }

/* Returns the flags with which a rank asks for more or fewer bits at the end of a window. `part` is
 * the part of a value that half as many bits would leave unsent. */
static unsigned window_wish(onebit_plan_t plan, double residual, double part) {
  plan->state->ladder.state.calls = OB_LADDER_WINDOW - 1;
  plan->state->ladder.state.worker = (struct ob_norms){
      .input = 1, .residual = residual * residual, .value = 1, .lower = part * part};
  ob_ladder_commit(plan);
  return (unsigned)plan->state->ladder.state.wish;
}

static void wishes_on_rank(onebit_comm_t comm, void *context) {
  const struct climb climb = {ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE};
  onebit_plan_t plan = ladder_plan(comm, &climb, 2);
  (void)context;
  if (!plan)
    return;
  CHECK(window_wish(plan, 0.5, 0.5) == 0, "half of a value is left: it can come down");
  CHECK(window_wish(plan, 0.5, 0.8) == OB_FLAG_STAY, "four fifths: residuals would be four inputs");
  CHECK(window_wish(plan, 3.5, 0.5) == OB_FLAG_STAY, "a residual of 3.5 inputs");
  CHECK(window_wish(plan, 4.5, 0.5) == (OB_FLAG_STAY | OB_FLAG_CLIMB), "a residual of 4.5 inputs");
  ob_ladder_begin(plan);
  ob_ladder_add_flags(&plan->state->ladder, 0, 30);
  ob_ladder_add_flags(&plan->state->ladder, 0, 20);
  CHECK(plan->state->ladder.max_rms == 30, "the largest residual is %g",
        (double)plan->state->ladder.max_rms);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

Test(ladder, wishes_as_documented) { on_ranks(1, wishes_on_rank, NULL); }

/* --- The residual loses nothing
 * ---------------------------------------------------------------- */

static double residual_change(const float *before, const float *after, size_t i) {
  return (double)before[i] - (double)after[i];
}

/* Checks on one rank: result = input + worker before - worker after + server before - server
 * after. */
static void invariant_on_rank(onebit_comm_t comm, void *context) {
  struct climb climb = {.schedule = ONEBIT_SCHEDULE_EXCHANGE};
  onebit_plan_t plan = ladder_plan(comm, &climb, 1);
  float *values = allocate(COUNT, sizeof *values), *result = allocate(COUNT, sizeof *result);
  static const int widths[] = {1, 1, 8, 1, 2, 1, 4, 8, 2, 4, 1, 1};
  struct kept_errors before = export_errors(plan);
  (void)context;
  for (int call = 0; call < (int)(sizeof widths / sizeof widths[0]); call++) {
    CHECK_STATUS(onebit_plan_set_bits(plan, widths[call]), ONEBIT_OK);
    ladder_fill(values, COUNT, 0, call);
    CHECK_STATUS(onebit_allreduce(values, result, plan), ONEBIT_OK);
    struct kept_errors after = export_errors(plan);
    for (size_t i = 0; i < COUNT; i++) {
      const double wanted = (double)values[i] + residual_change(before.worker, after.worker, i) +
                            residual_change(before.server, after.server, i);
      if (!CHECK(fabs((double)result[i] - wanted) < 1e-5 * (1 + fabs(wanted)),
                 "call %d, %d bits, element %zu: %g, not %g", call, widths[call], i,
                 (double)result[i], wanted))
        break;
    }
    free_errors(&before);
    before = after;
  }
  free_errors(&before);
  onebit_plan_destroy(plan);
  free(values);
  free(result);
}

Test(ladder, residual_survives_every_change) { on_ranks(1, invariant_on_rank, NULL); }

/* --- Checkpoints -------------------------------------------------------------------------------*/

/* Saves a plan after its bits were raised. Another plan loads this state and continues. */
static void checkpoint_on_rank(onebit_comm_t comm, void *context) {
  struct climb *climb = context;
  const int rank = onebit_comm_rank(comm);
  float *values = allocate(COUNT, sizeof *values), *result = allocate(COUNT, sizeof *result);
  float *again = allocate(COUNT, sizeof *again);
  onebit_plan_t plan = ladder_plan(comm, climb, 1), other = ladder_plan(comm, climb, 1);
  int call = LADDER_ORDINARY;
  for (; call < LADDER_ORDINARY + 5 * WINDOW + 3;
       call++) { /* ends where no bits change in the next three calls */
    ladder_fill(values, COUNT, rank, call);
    CHECK_STATUS(onebit_allreduce(values, result, plan), ONEBIT_OK);
  }
  CHECK(plan_info(plan).bits > 1, "%d bits", plan_info(plan).bits);
  struct kept_errors errors = export_errors(plan);
  CHECK_STATUS(onebit_plan_import_residual(other, errors.worker, errors.server), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_set_bits(other, plan_info(plan).bits), ONEBIT_OK);
  for (int k = 0; k < 3; k++, call++) {
    ladder_fill(values, COUNT, rank, call);
    CHECK_STATUS(onebit_allreduce(values, result, plan), ONEBIT_OK);
    CHECK_STATUS(onebit_allreduce(values, again, other), ONEBIT_OK);
    CHECK_BITS("result", again, result, COUNT, ONEBIT_FLOAT32);
  }
  free_errors(&errors);
  onebit_plan_destroy(plan);
  onebit_plan_destroy(other);
  free(values);
  free(result);
  free(again);
}

Test(ladder, goes_on_from_a_checkpoint) {
  struct climb climb = {.schedule = ONEBIT_SCHEDULE_EXCHANGE};
  on_ranks(2, checkpoint_on_rank, &climb);
}

/* --- Calls that do not succeed
 * ----------------------------------------------------------------- */

/* A skipped call adds no measurement and does not change the number of bits, on any rank. This also
 * holds for a call in which the ranks exchange the number of bits that they ask for. */
static void skips_on_rank(onebit_comm_t comm, void *context) {
  struct climb *climb = context;
  const int rank = onebit_comm_rank(comm);
  float *values = allocate(COUNT, sizeof *values), *result = allocate(COUNT, sizeof *result);
  onebit_plan_t plan = ladder_plan(comm, climb, 1);
  int well = 0;
  for (int call = 0; plan && well < 2 * WINDOW + 2; call++) {
    const bool skipped = call % 2 == 1;
    ladder_fill(values, COUNT, rank, LADDER_ORDINARY + well);
    if (skipped && rank == 1)
      values[5] = NAN;
    CHECK_STATUS(onebit_allreduce(values, result, plan), skipped ? ONEBIT_SKIPPED : ONEBIT_OK);
    well += !skipped;
    CHECK(plan_info(plan).bits == (well > 2 * WINDOW ? 2 : 1), "%d bits after %d calls",
          plan_info(plan).bits, well);
  }
  onebit_plan_destroy(plan);
  free(values);
  free(result);
}

Test(ladder, skipped_calls_count_for_nothing) {
  struct climb climb = {.schedule = ONEBIT_SCHEDULE_EXCHANGE};
  on_ranks(2, skips_on_rank, &climb);
}

/* Rank 0 has another width than the others. All ranks get an error, no rank hangs, and
 * onebit_plan_reset makes the widths equal. */
static void set_widths_apart_on_rank(onebit_comm_t comm, void *context) {
  struct climb *climb = context;
  const int rank = onebit_comm_rank(comm);
  float *values = allocate(COUNT, sizeof *values), *result = allocate(COUNT, sizeof *result);
  onebit_plan_t plan = ladder_plan(comm, climb, 1);
  ladder_fill(values, COUNT, rank, 0);
  CHECK_STATUS(onebit_plan_set_bits(plan, rank == 0 ? 2 : 4), ONEBIT_OK);
  CHECK_STATUS(onebit_allreduce(values, result, plan), ONEBIT_ERROR_MESSAGE);
  CHECK_STATUS(onebit_allreduce(values, result, plan), ONEBIT_ERROR_MESSAGE);
  synchronize_ranks(comm);
  CHECK_STATUS(onebit_plan_reset(plan), ONEBIT_OK);
  CHECK(plan_info(plan).bits == 1, "%d bits", plan_info(plan).bits);
  CHECK_STATUS(onebit_allreduce(values, result, plan), ONEBIT_OK);
  onebit_plan_destroy(plan);
  free(values);
  free(result);
}

Test(ladder, ranks_at_different_widths_are_told) {
  static const int sizes[] = {2, 3, 4, 5};
  for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
    struct climb climb = {.schedule = k % 2 ? ONEBIT_SCHEDULE_EXCHANGE : ONEBIT_SCHEDULE_ALLGATHER};
    check_case("%d ranks", sizes[k]);
    on_ranks(sizes[k], set_widths_apart_on_rank, &climb);
  }
}

/* --- A budget ----------------------------------------------------------------------------------*/

enum { PLANS = 4 };

/* Calls plans of the same size. The inputs of each plan are twice as large as those of the plan
 * before. */
static void call_all_plans(onebit_comm_t comm, const onebit_plan_t *plans) {
  float *values = allocate(COUNT, sizeof *values), *result = allocate(COUNT, sizeof *result);
  for (int call = 0; call <= WINDOW; call++)
    for (int k = 0; k < PLANS; k++) {
      ladder_fill(values, COUNT, onebit_comm_rank(comm), call);
      for (size_t i = 0; i < COUNT; i++)
        values[i] *= (float)(1 << k);
      CHECK_STATUS(onebit_allreduce(values, result, plans[k]), ONEBIT_OK);
    }
  free(values);
  free(result);
}

/* Checks that plans with larger values have at least as many bits. Unless all have 8 bits, the rest
 * of the budget must be too small to raise another plan. */
static void check_budget(const onebit_plan_t *plans, double budget) {
  double part = 0;
  int smallest = 8;
  CHECK_STATUS(onebit_plan_fit_budget(plans, PLANS, budget), ONEBIT_OK);
  for (int k = 0; k < PLANS; k++) {
    const int bits = plan_info(plans[k]).bits;
    CHECK(k == 0 || bits >= plan_info(plans[k - 1]).bits, "budget %g: plan %d has %d bits", budget,
          k, bits);
    part += (bits + 32.0 * 3 / COUNT) / PLANS / 32; /* scales of three blocks */
    smallest = bits < smallest ? bits : smallest;
  }
  CHECK(part <= budget, "budget %g: %g", budget, part);
  CHECK(smallest == 8 || part + (double)smallest / PLANS / 32 > budget, "budget %g: only %g",
        budget, part);
}

static void budget_on_rank(onebit_comm_t comm, void *context) {
  static const double budgets[] = {1, 1.0 / 12, 1.0 / 31, 1.0 / 20};
  struct climb climb = {.schedule = ONEBIT_SCHEDULE_EXCHANGE};
  onebit_plan_t plans[PLANS];
  (void)context;
  for (int k = 0; k < PLANS; k++)
    plans[k] = ladder_plan(comm, &climb, 1);
  call_all_plans(comm, plans);
  for (size_t b = 0; b < sizeof budgets / sizeof budgets[0]; b++) {
    check_budget(plans, budgets[b]);
    call_all_plans(comm, plans);
  }
  CHECK_STATUS(onebit_plan_fit_budget(plans, PLANS, 1.0 / 40), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("budget is 0.025, but even the fewest bits of the plans take 0.03");
  CHECK_STATUS(onebit_plan_fit_budget(NULL, 0, 0.5), ONEBIT_OK);
  for (int k = 0; k < PLANS; k++)
    onebit_plan_destroy(plans[k]);
}

Test(ladder, a_budget_goes_to_the_largest_residuals) { on_ranks(2, budget_on_rank, NULL); }

/* --- Arguments ---------------------------------------------------------------------------------*/

static void arguments_on_rank(onebit_comm_t comm, void *context) {
  (void)context;
  onebit_plan_options_t options = {.size = sizeof options, .bits = 2, .max_bits = 4};
  onebit_plan_t plan;
  CHECK_STATUS(onebit_plan_create(comm, 0, &options, &plan), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_set_bits(plan, 3), ONEBIT_ERROR_ARGUMENT);
  CHECK_STATUS(onebit_plan_set_bits(plan, 1), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("bits is 1, not a width from the plan's bits, 2, to its max_bits, 4");
  CHECK_STATUS(onebit_plan_set_bits(plan, 8), ONEBIT_ERROR_ARGUMENT);
  CHECK_STATUS(onebit_plan_set_bits(plan, 4), ONEBIT_OK);
  CHECK_STATUS(onebit_allreduce(NULL, NULL, plan), ONEBIT_OK);
  onebit_plan_destroy(plan);
}

Test(ladder, arguments) { on_ranks(1, arguments_on_rank, NULL); }
