/*
 * Checks the result of a compressed collective. The check needs no reference implementation: the
 * residuals change by the difference between the exact result and this one (onebit/plan.h):
 *
 *   allreduce        y = mean(x + e_old - e_new) + d_old - d_new
 *   reduce-scatter   y = mean(x + e_old - e_new)
 *   allgather        y = x + e_old - e_new, of each rank in its place
 *
 * Here e is the worker's residual, and d is the residual of the server of the element. In the
 * hierarchical schedule, e is the residual of a host, which one of its ranks stores, and the mean
 * of e is over the hosts. Each rank computes its own terms of the right-hand side, and the terms of
 * all ranks are summed in double, for PART elements at a time.
 */
#include <math.h>

#include "base/hash.h"
#include "bench/bench_collective.h"
#include "compression/numerics.h"

#define PART ((size_t)1 << 16) /* number of elements that are checked at a time */

/* The residuals before and after the call, and the offsets of this rank's input and output in the
 * whole result of all ranks. */
struct terms {
  onebit_plan_info_t info;
  float *worker[2], *server[2];
  size_t total, sent_first, received_first;
  double weight, residual_weight; /* the factors of an input and of a residual in the result */
};

static bool create_terms(const struct bench_case *test, struct terms *terms) {
  size_t rank = (size_t)test->team->rank, ranks = (size_t)test->team->size;
  const struct bench_collective *collective = test->collective;
  onebit_plan_info_t info = bench_plan_info(test->plan);
  bool hosts = info.schedule == ONEBIT_SCHEDULE_HIERARCHICAL, well = true;
  *terms = (struct terms){
      .info = info,
      .total = test->count * (collective->gathers || collective->scatters ? ranks : 1),
      .sent_first = collective->gathers ? rank * test->count : 0,
      .received_first = collective->scatters ? rank * test->count : 0,
      .weight = collective->gathers ? 1 : 1.0 / (double)ranks,
      .residual_weight = collective->gathers ? 1 : 1.0 / (hosts ? info.hosts : (double)ranks),
  };
  for (int k = 0; k < 2; k++) {
    terms->worker[k] = ob_allocate(info.worker_residual_count, sizeof(float));
    terms->server[k] = ob_allocate(info.server_residual_count, sizeof(float));
    well = well && terms->worker[k] && terms->server[k];
  }
  return well;
}

/* Adds `weight` times the change of a residual to *value. Adds the magnitude of the terms to *size,
 * which bounds rounding errors. */
static void add_change(double weight, float before, float after, double *value, double *size) {
  *value += weight * ((double)before - (double)after);
  *size += weight * (fabs((double)before) + fabs((double)after));
}

/* Computes this rank's terms for elements first .. first + count - 1 of the whole result. */
static void add_terms(const struct bench_case *test, const struct terms *terms, size_t first,
                      size_t count, double *values, double *sizes) {
  const onebit_plan_info_t *info = &terms->info;
  for (size_t i = 0; i < count; i++) {
    size_t sent = first + i - terms->sent_first; /* wraps around if the difference is negative */
    size_t served = first + i - info->server_residual_start;
    size_t residual = sent - info->worker_residual_start;
    values[i] = sizes[i] = 0;
    if (first + i >= terms->sent_first && sent < test->send_count) {
      values[i] = terms->weight * (double)ob_load(test->send, sent, test->options->dtype);
      sizes[i] = fabs(values[i]);
      if (residual < info->worker_residual_count) /* a dense wire has no residual */
        add_change(terms->residual_weight, terms->worker[0][residual], terms->worker[1][residual],
                   &values[i], &sizes[i]);
    }
    if (served < info->server_residual_count)
      add_change(1, terms->server[0][served], terms->server[1][served], &values[i], &sizes[i]);
  }
}

/* Returns the largest error that rounding can cause. It includes half a unit in the last place of
 * the result's dtype: at most half[dtype] times the result, or half of the smallest float16. */
static double error_bound(const struct bench_case *test, double size, double result) {
  static const double half[] = {0x1p-24, 0x1p-8, 0x1p-11}, least[] = {0, 0, 0x1p-25};
  onebit_dtype_t dtype = test->options->dtype;
  /* The worker rounds its compensated value and its residual, the sum over ranks is rounded, and
   * the server rounds. Together these are at most ranks + 8 roundings of terms that are no larger
   * than `size`. */
  return (test->team->size + 8) * 0x1p-24 * size + half[dtype] * fabs(result) + least[dtype];
}

/* Compares both sides of the equation for the elements that this rank has received. `scratch` has
 * space for 2 * PART numbers. */
static bool invariant_holds(struct bench_case *test, const struct terms *terms, double *scratch) {
  double *values = scratch, *sizes = scratch + PART;
  bool right = true;
  for (size_t first = 0; first < terms->total; first += PART) {
    size_t count = terms->total - first < PART ? terms->total - first : PART;
    add_terms(test, terms, first, count, values, sizes);
    test->team->kind->combine(test->team, scratch, 2 * PART, true);
    for (size_t i = 0; i < count; i++) {
      size_t received = first + i - terms->received_first;
      if (received >= test->receive_count)
        continue;
      double y = (double)ob_load(test->receive, received, test->options->dtype);
      right = right && fabs(y - values[i]) <= error_bound(test, sizes[i], values[i]);
    }
  }
  return right;
}

/* True if all ranks have the same result. Each half h of the hash of this rank's result is exact in
 * a double. The ranks agree if the maximum of h over all ranks equals the minimum, which is minus
 * the maximum of -h. */
static bool equal_on_all(struct bench_case *test) {
  size_t bytes = test->receive_count * ob_dtype_size(test->options->dtype);
  uint64_t hash = ob_hash(OB_HASH_START, test->receive, bytes);
  double high = (double)(hash >> 32), low = (double)(hash & 0xffffffffu);
  double values[] = {high, -high, low, -low};
  test->team->kind->combine(test->team, values, 4, false);
  return values[0] == -values[1] && values[2] == -values[3];
}

static int check_case(struct bench_case *test, struct terms *terms, double *scratch, bool *right) {
  onebit_plan_export_residual(test->plan, terms->worker[0], terms->server[0]);
  BENCH_TRY(bench_check_status(test->collective->call(test->send, test->receive, test->plan),
                               test->collective->name));
  onebit_plan_export_residual(test->plan, terms->worker[1], terms->server[1]);
  bool mine = invariant_holds(test, terms, scratch);
  if (!test->collective->scatters)
    mine = equal_on_all(test) && mine;
  *right = bench_team_agree(test->team, mine);
  return BENCH_OK;
}

int bench_case_check(struct bench_case *test, bool *right) {
  struct terms terms;
  double *scratch = ob_allocate(2 * PART, sizeof(double));
  bool well = create_terms(test, &terms) && scratch;
  int status = bench_team_agree(test->team, well) ? check_case(test, &terms, scratch, right)
                                                  : bench_report_no_memory("parts of residuals", 4);
  ob_release(scratch);
  for (int k = 0; k < 2; k++) {
    ob_release(terms.worker[k]);
    ob_release(terms.server[k]);
  }
  return status;
}

int bench_case_check_all(struct bench_case *test, bool *right) {
  int status = BENCH_OK;
  *right = true;
  for (size_t k = 0; test->options->check && k < test->plan_count && status == BENCH_OK; k++) {
    struct bench_way *way = &test->ways[k];
    if (!way->plan)
      continue;
    test->plan = way->plan;
    status = bench_case_check(test, &way->right);
    *right = *right && way->right;
  }
  return status;
}
