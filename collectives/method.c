/* Chooses a method: measures how long exchanges take on the slowest rank, and estimates how long a
 * training step takes. */
#include "onebit/method.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"
#include "base/process.h"
#include "collectives/communicator.h"
#include "collectives/cost/model.h"
#include "onebit/collectives.h"

enum { METHODS = ONEBIT_METHOD_LOCAL_STEPS + 1, EXCHANGES = ONEBIT_METHOD_ONE_BIT + 1 };

static const struct {
  const char *name;
  onebit_wire_t wire;
  int bits;
} rows[METHODS] = {
    [ONEBIT_METHOD_DENSE] = {"dense", ONEBIT_WIRE_DENSE, 0},
    [ONEBIT_METHOD_EIGHT_BITS] = {"8 bits", ONEBIT_WIRE_BITS, 8},
    [ONEBIT_METHOD_ONE_BIT] = {"one bit", ONEBIT_WIRE_BITS, 1},
    [ONEBIT_METHOD_LOCAL_STEPS] = {"local steps", ONEBIT_WIRE_BITS, 1},
};

static bool is_allowed(const onebit_method_choice_t *choice, int method) {
  return !choice->methods || choice->methods >> method & 1;
}

/* True if the exchange of this method must be measured. Local steps use the exchange of one bit, so
 * its time is needed for them, too. */
static bool needs_exchange_time(const onebit_method_choice_t *choice, int method) {
  return is_allowed(choice, method) ||
         (method == ONEBIT_METHOD_ONE_BIT && is_allowed(choice, ONEBIT_METHOD_LOCAL_STEPS));
}

/* --- Messages between the ranks ----------------------------------------------------------------*/

static bool is_number(double value) { return isfinite(value) && value >= 0; }

static onebit_status_t check_numbers(const char *name, const double *values, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (!is_number(values[i]))
      return ob_error(ONEBIT_ERROR_ARGUMENT, "choice->%s is %g: it must be finite and at least 0",
                      name, values[i]);
  return ONEBIT_OK;
}

static onebit_status_t check_choice(const onebit_method_choice_t *choice) {
  if (!choice)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "choice is NULL");
  if (choice->size != sizeof *choice)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "choice->size is %zu, not %zu", choice->size,
                    sizeof *choice);
  if (choice->methods < 0 || choice->methods >> METHODS)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "choice->methods is %d, not a sum of 1 << METHOD",
                    choice->methods);
  if ((int)choice->current < 0 || (int)choice->current >= METHODS)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "choice->current is %d, which is not a method",
                    (int)choice->current);
  OB_TRY(check_numbers("compute", &choice->compute, 1));
  OB_TRY(check_numbers("step", &choice->step, 1));
  OB_TRY(check_numbers("exchange", choice->exchange, METHODS));
  OB_TRY(check_numbers("bytes_a_day", &choice->bytes_a_day, 1));
  for (int m = 0; m < METHODS; m++)
    if (!isfinite(choice->extra[m]))
      return ob_error(ONEBIT_ERROR_ARGUMENT, "choice->extra[%d] is %g: it must be finite", m,
                      choice->extra[m]);
  return ONEBIT_OK;
}

/* Returns the number of local steps that the training uses now; 0: it uses none. */
static size_t current_local_steps(const onebit_method_choice_t *choice) {
  return choice->current == ONEBIT_METHOD_LOCAL_STEPS ? choice->local_steps : 0;
}

static uint64_t hash_numbers(const onebit_method_choice_t *choice) {
  const size_t steps = current_local_steps(choice);
  const uint64_t local = ob_hash(OB_HASH_START, &steps, sizeof steps);
  const uint64_t extra = ob_hash(local, choice->extra, sizeof choice->extra);
  const uint64_t exchange = ob_hash(extra, choice->exchange, sizeof choice->exchange);
  const uint64_t step = ob_hash(exchange, &choice->step, sizeof choice->step);
  return ob_hash(step, &choice->bytes_a_day, sizeof choice->bytes_a_day);
}

/* Agrees on the settings that must be the same on all ranks, and sets `number` to the largest value
 * of all ranks. Numbers are not negative, so their bits, read as integers, have the same order. */
static onebit_status_t agree_on_choice(onebit_comm_t comm, onebit_status_t status,
                                       const onebit_method_choice_t *choice, double *number) {
  const struct ob_term terms[] = {
      {"choice->elements", status == ONEBIT_OK ? choice->elements : 0},
      {"choice->methods", status == ONEBIT_OK ? (uint64_t)choice->methods : 0},
      {"choice->blocking", status == ONEBIT_OK && choice->blocking},
      {"choice->current", status == ONEBIT_OK ? (uint64_t)choice->current : 0},
      {"choice->exchange, step, extra, bytes_a_day or local_steps",
       status == ONEBIT_OK ? hash_numbers(choice) : 0}};
  uint64_t largest = 0;
  memcpy(&largest, number, sizeof largest);
  OB_TRY(ob_agree_noting(comm, status, terms, sizeof terms / sizeof terms[0], largest));
  for (int rank = 0; rank < comm->size; rank++)
    largest = ob_agree_note(comm, rank) > largest ? ob_agree_note(comm, rank) : largest;
  memcpy(number, &largest, sizeof largest);
  return ONEBIT_OK;
}

/* --- Exchanges ---------------------------------------------------------------------------------*/

struct probe {
  onebit_comm_t comm;
  const onebit_method_choice_t *choice;
  onebit_method_exchange_t exchange;
  void *context;
};

static onebit_status_t run_default_exchange(void *context, onebit_method_t method, size_t elements,
                                            double *seconds) {
  onebit_comm_t comm = context;
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_t plan = NULL;
  options.wire = rows[method].wire;
  options.bits = rows[method].bits;
  float *values = ob_allocate(elements, sizeof *values);
  onebit_status_t status =
      values ? ONEBIT_OK : ob_error(ONEBIT_ERROR_MEMORY, "out of memory for measuring exchanges");
  status = ob_agree(comm, status, NULL, 0);
  for (size_t i = 0; i < elements && status == ONEBIT_OK; i++)
    values[i] = (float)(i % 31) - 15;
  if (status == ONEBIT_OK)
    status = onebit_plan_create(comm, elements, &options, &plan);
  const double began = ob_seconds();
  if (status == ONEBIT_OK)
    status = onebit_allreduce(values, values, plan);
  *seconds = ob_seconds() - began;
  onebit_plan_destroy(plan);
  ob_release(values);
  return status;
}

/* Measures the seconds of one exchange on the slowest rank. */
static onebit_status_t time_exchange(const struct probe *probe, onebit_method_t method,
                                     size_t elements, double *seconds) {
  *seconds = 0;
  onebit_status_t status = probe->exchange(probe->context, method, elements, seconds);
  if (status == ONEBIT_OK && !is_number(*seconds))
    status = ob_error(
        ONEBIT_ERROR_ARGUMENT,
        "the exchange callback has set seconds to %g: it must be finite and at least 0", *seconds);
  if (status != ONEBIT_OK)
    *seconds = 0;
  return agree_on_choice(probe->comm, status, probe->choice, seconds);
}

/* A measurement increases the number of elements until the time of an exchange depends on it. If
 * another program may have made an exchange longer, that exchange is measured again: one that is
 * short, or one whose time grew by a larger factor than the elements. */
enum { FIRST = 1 << 10, SMALL = 1 << 14, LAST = 1 << 22 };
#define DELAY       0.03  /* seconds; an exchange of few elements that takes longer has a delay */
#define SHOWS_AFTER 0.015 /* seconds; the smallest time from which others may be extrapolated */
#define SPENT_AFTER 0.4   /* the largest total in seconds, or in multiples of the first exchange: */
#define SPENT_TIMES 8     /* 2, and 3 growths from FIRST to LAST, each measured at most twice */

/* The method with fewer bits, which was measured before, limits the time of an exchange. Below this
 * limit in seconds, all elements are exchanged at once where small exchanges would be as long: on a
 * link with a long delay. Elsewhere the limit is DELAY. */
#define AT_ONCE 0.8
/* The factor by which a forecast exceeds the quotient of the bits, because codecs and libraries
 * differ. */
#define MARGIN 2.0

/* A forecast of a method's exchanges, from the measurement of a method with fewer bits. */
struct forecast {
  double fewer;       /* seconds of the exchange with fewer bits; 0: not measured */
  double per_element; /* seconds, at most; infinite if nothing is known */
  double delay;       /* seconds of an exchange of FIRST elements */
};

static bool has_delay(double first) { return first >= DELAY; }

/* Returns how many elements can be exchanged at once. */
static size_t count_at_once(const struct forecast *forecast, size_t end) {
  const double seconds = has_delay(forecast->delay) ? AT_ONCE : DELAY;
  const double count = seconds / forecast->per_element;
  return count < (double)end ? (size_t)count : end;
}

/* Measures an exchange, and once more if it takes from `least` to `most` seconds; takes the shorter
 * time. Adds the seconds of both to `spent`. */
static onebit_status_t time_again(const struct probe *probe, onebit_method_t method, size_t count,
                                  double least, double most, double *seconds, double *spent) {
  double again;
  OB_TRY(time_exchange(probe, method, count, seconds));
  *spent += *seconds;
  if (*seconds < least || *seconds > most)
    return ONEBIT_OK;
  OB_TRY(time_exchange(probe, method, count, &again));
  *spent += again;
  *seconds = fmin(*seconds, again);
  return ONEBIT_OK;
}

/* Returns the factor by which the number of elements grows. Without a forecast: 64 if exchanges are
 * long but do not depend on the number, as on a link with a long delay. With one: 16 if it says
 * that they are short, and else 4. */
static size_t choose_growth(const struct forecast *forecast, size_t count, double seconds,
                            double first) {
  if (has_delay(seconds) && isinf(forecast->per_element))
    return seconds < 1.25 * first ? 64 : 16;
  return 16 * (double)count * forecast->per_element < 2 * DELAY ? 16 : 4;
}

/* Measures exchanges of growing sizes, and extrapolates to all elements. The first exchange may
 * also open connections, so a longer one that takes less time replaces it.
 *   shortest   in, out: the seconds of an exchange of FIRST elements
 *   spent      the seconds of all exchanges so far */
static onebit_status_t measure_growing(const struct probe *probe, onebit_method_t method,
                                       const struct forecast *forecast, double *shortest,
                                       double spent, double *result) {
  const size_t elements = probe->choice->elements, end = elements < LAST ? elements : LAST;
  const size_t first_count = end < FIRST ? end : FIRST, at_once = count_at_once(forecast, end);
  size_t count = first_count;
  double first = *shortest, seconds = first;
  for (bool shows = false; count < end && !shows;) {
    const size_t growth = choose_growth(forecast, count, seconds, first);
    count = end / growth > count ? growth * count : end;
    if (has_delay(first) && at_once > count)
      count = at_once;
    const double usual = 1.5 * seconds * (count <= SMALL ? 1 : (double)growth);
    OB_TRY(time_again(probe, method, count, fmax(DELAY, usual), INFINITY, &seconds, &spent));
    first = fmin(first, seconds);
    shows =
        spent >= fmax(SPENT_AFTER, SPENT_TIMES * first) ||
        (seconds >= SHOWS_AFTER && seconds >= 2 * first) ||
        (has_delay(first) && at_once > first_count && count >= at_once && seconds >= 1.25 * first);
  }
  *shortest = first;
  const double rate = count > first_count ? (seconds - first) / (double)(count - first_count) : 0;
  *result = seconds + fmax(rate, 0.1 * seconds / (double)count) * (double)(elements - count);
  return ONEBIT_OK;
}

/* Measures a method. Dense sums may use another library, with another delay, so a small exchange
 * comes first. If that alone takes longer than the whole exchange with fewer bits, as with a ring
 * of ranks on a link with a long delay, the rest of the time is taken from the forecast. */
static onebit_status_t measure_method(const struct probe *probe, onebit_method_t method,
                                      struct forecast *forecast, double *result) {
  const size_t elements = probe->choice->elements, end = elements < LAST ? elements : LAST;
  double first, spent = 0;
  if (count_at_once(forecast, end) == elements && method != ONEBIT_METHOD_DENSE)
    return time_again(probe, method, elements, 0, DELAY, result, &spent);
  OB_TRY(time_again(probe, method, end < FIRST ? end : FIRST, 0, DELAY, &first, &spent));
  if (has_delay(first) && forecast->fewer > 0 && first > forecast->fewer) {
    *result = first + forecast->per_element / MARGIN * (double)elements;
    return ONEBIT_OK;
  }
  OB_TRY(measure_growing(probe, method, forecast, &first, spent, result));
  forecast->delay = forecast->fewer > 0 ? fmin(first, forecast->delay) : first;
  return ONEBIT_OK;
}

static int wire_bits(int method) { return method == ONEBIT_METHOD_DENSE ? 32 : rows[method].bits; }

/* Measures the methods in the order of their bits, so that each limits the time of the next. */
static onebit_status_t measure_exchanges(onebit_comm_t comm, onebit_method_choice_t *choice,
                                         onebit_method_exchange_t exchange, void *context) {
  const struct probe probe = {comm, choice, exchange ? exchange : run_default_exchange,
                              exchange ? context : comm};
  double found[METHODS] = {0}, nothing = 0;
  struct forecast forecast = {0, INFINITY, 0};
  OB_TRY(agree_on_choice(comm, check_choice(choice), choice, &nothing));
  for (int m = EXCHANGES - 1, before = m; m >= 0 && choice->elements; m--)
    if (needs_exchange_time(choice, m)) {
      forecast.per_element *= MARGIN * wire_bits(m) / wire_bits(before);
      OB_TRY(measure_method(&probe, (onebit_method_t)m, &forecast, &found[m]));
      forecast.fewer = found[m];
      forecast.per_element = fmax(found[m] - forecast.delay, 0) / (double)choice->elements;
      before = m;
    }
  found[ONEBIT_METHOD_LOCAL_STEPS] = found[ONEBIT_METHOD_ONE_BIT];
  memcpy(choice->exchange, found, sizeof found);
  return ONEBIT_OK;
}

onebit_status_t onebit_method_measure(onebit_comm_t comm, onebit_method_choice_t *choice,
                                      onebit_method_exchange_t exchange, void *context) {
  OB_CALL_SCOPE;
  OB_TRY(ob_handle_check(comm, OB_HANDLE_COMM, "comm"));
  return measure_exchanges(comm, choice, exchange, context);
}

/* --- The choice --------------------------------------------------------------------------------*/

static bool exceeds_byte_budget(onebit_comm_t comm, const onebit_method_choice_t *choice,
                                int method, double exchanges_a_second) {
  const struct ob_cost_task task = {.elements = choice->elements,
                                    .bits = rows[method].bits,
                                    .hosts = comm->hosts.count,
                                    .ranks = comm->size,
                                    .max_ranks = comm->hosts.max};
  const double bytes = ob_cost_host_bytes(&task, ONEBIT_SCHEDULE_EXCHANGE, rows[method].wire);
  return choice->bytes_a_day > 0 && 86400 * exchanges_a_second * bytes > choice->bytes_a_day;
}

static double exchange_wait_seconds(const onebit_method_choice_t *choice, int method) {
  const double exchange = choice->exchange[method];
  return choice->blocking ? exchange : ob_step_waiting(exchange, choice->compute, OB_STEP_BUCKETS);
}

static double estimate_step_seconds(onebit_comm_t comm, const onebit_method_choice_t *choice,
                                    int method) {
  const double seconds =
      choice->compute + exchange_wait_seconds(choice, method) + choice->extra[method];
  return !is_allowed(choice, method) || exceeds_byte_budget(comm, choice, method, 1 / seconds)
             ? INFINITY
             : seconds;
}

/* Returns the limit of an exchange's time, as a part of the time of the local steps before it. More
 * local steps cost loss, so that a training needs more steps: docs/measured/outer.md compares both
 * costs. The limit is different for the current number of local steps, so that a small change of
 * the time does not change that number. */
static double max_exchange_part(size_t steps, size_t current) {
  if (!current || steps > current)
    return 0.75;
  return steps == current ? 1.05 : 0.53;
}

/* True if steps with one bit would wait for the link longer than they compute. A training with
 * local steps keeps them until the wait is less than 0.7 of the computing time. */
static bool waits_longer_than_computes(const onebit_method_choice_t *choice) {
  const double bearable = (current_local_steps(choice) ? 0.7 : 1.0) * choice->compute;
  return exchange_wait_seconds(choice, ONEBIT_METHOD_ONE_BIT) > bearable;
}

/* Local steps cost loss, so by default only bytes_a_day is a reason for them. */
static bool needs_local_steps(onebit_comm_t comm, const onebit_method_choice_t *choice) {
  const double wait = exchange_wait_seconds(choice, ONEBIT_METHOD_ONE_BIT);
  return is_allowed(choice, ONEBIT_METHOD_LOCAL_STEPS) &&
         ((choice->methods && waits_longer_than_computes(choice)) ||
          exceeds_byte_budget(comm, choice, ONEBIT_METHOD_ONE_BIT, 1 / (choice->compute + wait)));
}

/* Sets the smallest sufficient number of local steps, and returns the seconds of a training step;
 * INFINITY: no number is sufficient. */
static double estimate_local_step_seconds(onebit_comm_t comm, const onebit_method_choice_t *choice,
                                          size_t *number) {
  static const size_t steps[] = {10, 30, 100, 300};
  const int method = ONEBIT_METHOD_LOCAL_STEPS;
  const size_t current = current_local_steps(choice);
  for (size_t k = 0; k < sizeof steps / sizeof steps[0]; k++) {
    const double each = choice->exchange[method] / (double)steps[k];
    const double seconds = choice->compute + each + choice->extra[method];
    const bool is_last = k + 1 == sizeof steps / sizeof steps[0];
    *number = steps[k];
    if (!exceeds_byte_budget(comm, choice, method, 1 / seconds / (double)steps[k]) &&
        (is_last || each <= choice->compute * max_exchange_part(steps[k], current)))
      return seconds;
  }
  return INFINITY;
}

/* Returns true if a method's exchange alone saves as much of a dense step's time as is required for
 * a change of method. The rest of a measured step's time may be due to other programs. */
static bool saves_exchange(const onebit_method_choice_t *choice, int method) {
  return !isfinite(choice->expected[ONEBIT_METHOD_DENSE]) ||
         choice->exchange[ONEBIT_METHOD_DENSE] - choice->exchange[method] >=
             (OB_STEP_WORTH - 1) * choice->expected[method];
}

static int find_best_method(const onebit_method_choice_t *choice) {
  int best = (int)choice->current;
  for (int m = 0; m < METHODS; m++) {
    const double worth = m == ONEBIT_METHOD_DENSE ? OB_STEP_WORTH_DENSE : OB_STEP_WORTH;
    if (m != best && isfinite(choice->expected[m]) &&
        worth * choice->expected[m] <= choice->expected[best] &&
        (best != ONEBIT_METHOD_DENSE || saves_exchange(choice, m)))
      best = m;
  }
  return best;
}

struct duration {
  char text[24];
};

static struct duration format_duration(double seconds) {
  struct duration made;
  const bool is_long = seconds >= 0.1;
  snprintf(made.text, sizeof made.text, "%.3g %s", is_long ? seconds : 1000 * seconds,
           is_long ? "s" : "ms");
  return made;
}

static void append_text(onebit_method_choice_t *choice, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Appends to the text of the choice. Text that does not fit is left out. */
static void append_text(onebit_method_choice_t *choice, const char *format, ...) {
  const size_t at = strlen(choice->text);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(choice->text + at, sizeof choice->text - at, format, arguments);
  va_end(arguments);
}

/* Appends the estimated seconds of a step with this method, the method's name or "", and the
 * seconds by which measured steps were longer than the model. */
static void append_step(onebit_method_choice_t *choice, int method, const char *name) {
  const double seconds = choice->expected[method], extra = choice->extra[method];
  append_text(choice, "%s%s", format_duration(seconds).text, name);
  if (fabs(extra) > 0.01 * seconds)
    append_text(choice, " (%s %s than by the cost model)", format_duration(fabs(extra)).text,
                extra < 0 ? "less" : "more");
}

/* `number` local steps would take `local` seconds each. */
static void describe_choice(onebit_method_choice_t *choice, double local, size_t number) {
  choice->text[0] = '\0';
  append_text(choice, "chooses %s", rows[choice->method].name);
  if (choice->local_steps)
    append_text(choice, " (%zu)", choice->local_steps);
  append_text(choice, ", and expects a step of ");
  append_step(choice, (int)choice->method, "");
  if (choice->method != ONEBIT_METHOD_DENSE && isfinite(choice->expected[ONEBIT_METHOD_DENSE])) {
    append_text(choice, " instead of ");
    append_step(choice, ONEBIT_METHOD_DENSE, " dense");
  }
  append_text(choice, ": the computation takes %s, an exchange",
              format_duration(choice->compute).text);
  for (int m = 0, some = 0; m < EXCHANGES; m++)
    if (needs_exchange_time(choice, m))
      append_text(choice, "%s %s %s", some++ ? "," : "", format_duration(choice->exchange[m]).text,
                  rows[m].name);
  if (choice->blocking)
    append_text(choice, ", not overlapped");
  if (choice->method == ONEBIT_METHOD_DENSE)
    append_text(choice, "; no other method is %.0f %% faster", 100 * (OB_STEP_WORTH - 1));
  if (!choice->methods && choice->method != ONEBIT_METHOD_LOCAL_STEPS &&
      waits_longer_than_computes(choice))
    append_text(choice, "; local steps (%zu) would take %s, at a higher loss", number,
                format_duration(local).text);
}

static onebit_status_t choose_method(onebit_comm_t comm, onebit_method_choice_t *choice) {
  const int current = (int)choice->current;
  const size_t local = current_local_steps(choice);
  if (choice->step > 0)
    choice->extra[current] = choice->step - choice->compute -
                             (local ? choice->exchange[current] / (double)local
                                    : exchange_wait_seconds(choice, current));
  for (int m = 0; m < EXCHANGES; m++)
    choice->expected[m] = estimate_step_seconds(comm, choice, m);
  size_t number = 0;
  const double seconds = estimate_local_step_seconds(comm, choice, &number);
  choice->expected[ONEBIT_METHOD_LOCAL_STEPS] =
      needs_local_steps(comm, choice) ? seconds : INFINITY;
  choice->method = (onebit_method_t)find_best_method(choice);
  if (!isfinite(choice->expected[choice->method]))
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "choice->bytes_a_day is %g, but each of the methods sends more bytes",
                    choice->bytes_a_day);
  choice->local_steps = choice->method == ONEBIT_METHOD_LOCAL_STEPS ? number : 0;
  choice->warmup_steps = choice->method == ONEBIT_METHOD_EIGHT_BITS ? SIZE_MAX - 1 : 0;
  choice->dense_below = choice->method == ONEBIT_METHOD_DENSE ? SIZE_MAX : 0;
  describe_choice(choice, seconds, number);
  return ONEBIT_OK;
}

onebit_status_t onebit_method_choose(onebit_comm_t comm, onebit_method_choice_t *choice) {
  OB_CALL_SCOPE;
  static const double nothing[METHODS] = {0};
  OB_TRY(ob_handle_check(comm, OB_HANDLE_COMM, "comm"));
  onebit_status_t status = check_choice(choice);
  double compute = status == ONEBIT_OK ? choice->compute : 0;
  OB_TRY(agree_on_choice(comm, status, choice, &compute));
  choice->compute = compute;
  if (memcmp(choice->exchange, nothing, sizeof nothing) == 0)
    OB_TRY(measure_exchanges(comm, choice, NULL, NULL));
  return choose_method(comm, choice);
}
