/*
 * Checks a result. No reference implementation is needed: a compressed collective says itself, in
 * the residuals, what it has left out (onebit/plan.h):
 *
 *   allreduce        y = mean(x + e_old - e_new) + d_old - d_new
 *   reduce-scatter   y = mean(x + e_old - e_new)
 *   allgather        y = x + e_old - e_new, of each rank in its place
 *
 * with e the worker's residual and d that of the element's server; in the hierarchical schedule e
 * is a host's, kept by one of its ranks, and its mean is over the hosts. Every rank adds its terms
 * of the right-hand side, in double, to what is summed over the ranks, some elements at a time.
 */
#include <math.h>
#include <stdlib.h>

#include "base/memory.h"
#include "bench/bench_collective.h"
#include "compression/numerics.h"

#define PART ((size_t)1 << 16) /* elements at a time */

/* The residuals before and after the call. */
struct errors {
  onebit_plan_info_t info;
  float *worker[2], *server[2];
};

static bool create_errors(const struct bench_case *test, struct errors *errors) {
  errors->info.size = sizeof errors->info;
  onebit_plan_get_info(test->plan, &errors->info);
  bool well = true;
  for (int k = 0; k < 2; k++) {
    errors->worker[k] = ob_allocate(errors->info.worker_residual_count, sizeof(float));
    errors->server[k] = ob_allocate(errors->info.server_residual_count, sizeof(float));
    well = well && errors->worker[k] && errors->server[k];
  }
  return well;
}

static void destroy_errors(struct errors *errors) {
  for (int k = 0; k < 2; k++) {
    ob_release(errors->worker[k]);
    ob_release(errors->server[k]);
  }
}

/* Where the parts of this rank lie in the result of all: what it sent, what it received. */
struct place {
  size_t total, sent_first, received_first;
  double weight, kept_weight; /* of an input in the result, and of a residual */
};

static struct place place_of(const struct bench_case *test, const struct errors *errors) {
  size_t rank = (size_t)test->team->rank, ranks = (size_t)test->team->size;
  const struct bench_collective *collective = test->collective;
  bool parts = collective->gathers || collective->scatters;
  bool hosts = errors->info.schedule == ONEBIT_SCHEDULE_HIERARCHICAL;
  return (struct place){
      .total = test->count * (parts ? ranks : 1),
      .sent_first = collective->gathers ? rank * test->count : 0,
      .received_first = collective->scatters ? rank * test->count : 0,
      .weight = collective->gathers ? 1 : 1.0 / (double)ranks,
      .kept_weight = collective->gathers ? 1 : 1.0 / (hosts ? errors->info.hosts : (double)ranks),
  };
}

/* Adds `weight` times what was left out, and the size of the terms: rounding is relative to it. */
static void add_change(double weight, float before, float after, double *value, double *size) {
  *value += weight * ((double)before - (double)after);
  *size += weight * (fabs((double)before) + fabs((double)after));
}

/* This rank's terms for elements first .. first + count - 1 of the result of all. */
static void add_terms(const struct bench_case *test, const struct errors *errors,
                      const struct place *place, size_t first, size_t count, double *values,
                      double *sizes) {
  for (size_t i = 0; i < count; i++) {
    size_t sent = first + i - place->sent_first;
    size_t served = first + i - errors->info.server_residual_start;
    size_t kept = sent - errors->info.worker_residual_start; /* beyond the count, when before it */
    values[i] = sizes[i] = 0;
    if (first + i >= place->sent_first && sent < test->send_count) {
      double x = (double)ob_load(test->send, sent, test->options->dtype);
      values[i] = place->weight * x;
      sizes[i] = fabs(place->weight * x);
      if (kept < errors->info.worker_residual_count) /* a dense wire keeps none */
        add_change(place->kept_weight, errors->worker[0][kept], errors->worker[1][kept], &values[i],
                   &sizes[i]);
    }
    if (first + i >= errors->info.server_residual_start &&
        served < errors->info.server_residual_count)
      add_change(1, errors->server[0][served], errors->server[1][served], &values[i], &sizes[i]);
  }
}

/* What storing a number in a dtype may round away: half a unit in its last place, at most this part
 * of it, and half the smallest float16. */
static double tolerance(const struct bench_case *test, double size, double result) {
  static const double half[] = {0x1p-24, 0x1p-8, 0x1p-11}, least[] = {0, 0, 0x1p-25};
  onebit_dtype_t dtype = test->options->dtype;
  /* Each rank's compensation and new error, the sum over ranks, the server's likewise: fewer than
   * ranks + 8 roundings of terms that are no larger than `size`. */
  return (test->team->size + 8) * 0x1p-24 * size + half[dtype] * fabs(result) + least[dtype];
}

/* Compares what this rank has of these elements. */
static bool compare(const struct bench_case *test, const struct place *place, size_t first,
                    size_t count, const double *values, const double *sizes) {
  bool right = true;
  for (size_t i = 0; i < count; i++) {
    size_t received = first + i - place->received_first;
    if (first + i < place->received_first || received >= test->receive_count)
      continue;
    double y = (double)ob_load(test->receive, received, test->options->dtype);
    right = right && fabs(y - values[i]) <= tolerance(test, sizes[i], values[i]);
  }
  return right;
}

/* `scratch` has room for two parts. */
static bool invariant_holds(struct bench_case *test, const struct errors *errors, double *scratch) {
  struct place place = place_of(test, errors);
  bool right = true;
  for (size_t first = 0; first < place.total; first += PART) {
    size_t count = place.total - first < PART ? place.total - first : PART;
    add_terms(test, errors, &place, first, count, scratch, scratch + PART);
    test->team->kind->combine(test->team, scratch, 2 * PART, true);
    right = compare(test, &place, first, count, scratch, scratch + PART) && right;
  }
  return right;
}

/* FNV-1a of this rank's result, as two halves that are exact in double: the ranks agree when
 * neither h nor -h has a maximum that is someone else's. */
static bool equal_on_all(struct bench_case *test) {
  const unsigned char *bytes = test->receive;
  size_t count = test->receive_count * ob_dtype_size(test->options->dtype);
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < count; i++)
    hash = (hash ^ bytes[i]) * 0x100000001b3u;
  double high = (double)(hash >> 32), low = (double)(hash & 0xffffffffu);
  double values[] = {high, -high, low, -low};
  test->team->kind->combine(test->team, values, 4, false);
  return values[0] == -values[1] && values[2] == -values[3];
}

static int check(struct bench_case *test, struct errors *errors, double *scratch, bool *right) {
  onebit_plan_export_residual(test->plan, errors->worker[0], errors->server[0]);
  onebit_status_t status = test->collective->call(test->send, test->receive, test->plan);
  if (status != ONEBIT_OK)
    return bench_status(status, test->collective->name);
  onebit_plan_export_residual(test->plan, errors->worker[1], errors->server[1]);
  bool mine = invariant_holds(test, errors, scratch);
  if (!test->collective->scatters)
    mine = equal_on_all(test) && mine;
  *right = bench_team_agree(test->team, mine);
  return BENCH_OK;
}

int bench_case_check(struct bench_case *test, bool *right) {
  struct errors errors = {.worker = {NULL}};
  double *scratch = ob_allocate(2 * PART, sizeof(double));
  bool well = create_errors(test, &errors) && scratch;
  int status = BENCH_FAILED;
  if (bench_team_agree(test->team, well))
    status = check(test, &errors, scratch, right);
  else if (test->team->rank == 0)
    bench_complain("-c: no memory for the residuals on every rank");
  ob_release(scratch);
  destroy_errors(&errors);
  return status;
}
