/* Tests the choice of a method with exchange times that a model gives, on ranks that must agree. */
#include "tests/support.h"

enum { ELEMENTS = 1 << 20 };
static const double bits[] = {32, 8, 1};

/* The model of a link. `extra` is the additional time of this rank's exchanges, `ring` that of
 * dense sums, and `opening` that of the first exchange. */
struct link {
  double rate, latency, extra; /* bytes per second; seconds */
  size_t calls, elements;      /* totals of all exchanges */
  double ring, opening;
};

static onebit_status_t time_exchange(void *context, onebit_method_t method, size_t elements,
                                     double *seconds) {
  struct link *link = context;
  link->calls++;
  link->elements += elements;
  *seconds = link->latency + bits[method] / 8 * (double)elements / link->rate + link->extra;
  *seconds += method == ONEBIT_METHOD_DENSE ? link->ring : 0;
  *seconds += link->calls == 1 ? link->opening : 0;
  return ONEBIT_OK;
}

static onebit_method_choice_t make_choice(size_t elements, double compute) {
  onebit_method_choice_t choice = ONEBIT_METHOD_CHOICE_INIT;
  choice.elements = elements;
  choice.compute = compute;
  return choice;
}

struct row {
  double rate, latency, compute;
  int methods;
  onebit_method_t wanted;
  size_t local_steps;
};

static const struct row rows[] = {
    {1e9, 1e-4, 1, 0, ONEBIT_METHOD_DENSE, 0},
    {4e6, 1e-4, 1, 0, ONEBIT_METHOD_EIGHT_BITS, 0},
    {4e6, 4e-2, 1, 0, ONEBIT_METHOD_EIGHT_BITS, 0},
    {4e5, 1e-4, 1, 0, ONEBIT_METHOD_ONE_BIT, 0},
    {4e5, 1e-4, 1, 1 << ONEBIT_METHOD_DENSE, ONEBIT_METHOD_DENSE, 0},
    {1.2e5, 1e-4, 1, 0, ONEBIT_METHOD_ONE_BIT, 0},
    {4e4, 1e-4, 1, 7, ONEBIT_METHOD_ONE_BIT, 0},
    {4e4, 1e-4, 1, 0, ONEBIT_METHOD_ONE_BIT, 0},
    {4e4, 1e-4, 1, 15, ONEBIT_METHOD_LOCAL_STEPS, 10},
    {1e3, 1e-4, 1, 1 << ONEBIT_METHOD_LOCAL_STEPS | 1, ONEBIT_METHOD_LOCAL_STEPS, 300},
};

/* Checks that each method is chosen, with its options, where it is the fastest. */
static void check_choices(onebit_comm_t comm, void *context) {
  (void)context;
  for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
    const struct row *row = &rows[k];
    struct link link = {row->rate, row->latency, 0, 0, 0, 0, 0};
    onebit_method_choice_t choice = make_choice(ELEMENTS, row->compute);
    check_case("row %zu", k);
    choice.methods = row->methods;
    CHECK_STATUS(onebit_method_measure(comm, &choice, time_exchange, &link), ONEBIT_OK);
    const double one = ELEMENTS / 8.0 / row->rate + row->latency;
    CHECK(fabs(choice.exchange[ONEBIT_METHOD_LOCAL_STEPS] / one - 1) < 0.02 || row->methods == 1,
          "%g s, not %g", choice.exchange[ONEBIT_METHOD_LOCAL_STEPS], one);
    CHECK_STATUS(onebit_method_choose(comm, &choice), ONEBIT_OK);
    CHECK(choice.method == row->wanted && choice.local_steps == row->local_steps, "%s",
          choice.text);
    CHECK((choice.dense_below == SIZE_MAX) == (row->wanted == ONEBIT_METHOD_DENSE), "%zu",
          choice.dense_below);
    CHECK((choice.warmup_steps > 0) == (row->wanted == ONEBIT_METHOD_EIGHT_BITS), "%zu",
          choice.warmup_steps);
    CHECK(strstr(choice.text, "chooses ") == choice.text &&
              strstr(choice.text, "computation takes 1 s"),
          "%s", choice.text);
    CHECK(!strstr(choice.text, "; no other method is 5 % faster") ==
              (choice.method != ONEBIT_METHOD_DENSE),
          "%s", choice.text);
    const bool waits = row->rate == 4e4 && row->methods == 0; /* the exchange takes 3.28 s */
    CHECK(!strstr(choice.text, "; local steps (10) would take 1.33 s, at a higher loss") == !waits,
          "%s", choice.text);
  }
}
Test(method, choices) { on_ranks(3, check_choices, NULL); }

/* Checks a training whose steps took longer than a short exchange explains, for example because of
 * other programs. It must stay dense, and the text must give the unexplained time. A long exchange
 * must be compressed nevertheless. */
static void check_unexplained_seconds(onebit_comm_t comm, void *context) {
  (void)context;
  for (int is_long = 0; is_long < 2; is_long++) {
    onebit_method_choice_t choice = make_choice(ELEMENTS, 1.0);
    const double exchange[4] = {0.04, 0.03, 0.02, 0.02};
    for (int m = 0; m < 4; m++)
      choice.exchange[m] = exchange[m] * (is_long ? 10 : 1);
    choice.current = ONEBIT_METHOD_DENSE;
    choice.step = 1.3;
    CHECK_STATUS(onebit_method_choose(comm, &choice), ONEBIT_OK);
    CHECK(choice.method == (is_long ? ONEBIT_METHOD_EIGHT_BITS : ONEBIT_METHOD_DENSE), "%s",
          choice.text);
    CHECK(strstr(choice.text, is_long
                                  ? "instead of 1.3 s dense (0.284 s more than by the cost model): "
                                  : "a step of 1.3 s (0.298 s more than by the cost model): "),
          "%s", choice.text);
  }
}
Test(method, unexplained_seconds) { on_ranks(2, check_unexplained_seconds, NULL); }

/* Checks that an exchange that overlaps with nothing adds all of its time to a step. */
static void check_blocking(onebit_comm_t comm, void *context) {
  (void)context;
  for (int blocking = 0; blocking < 2; blocking++) {
    onebit_method_choice_t choice = make_choice(ELEMENTS, 1.0);
    choice.exchange[0] = 1, choice.exchange[1] = 0.25, choice.exchange[2] = 0.03;
    choice.blocking = blocking;
    CHECK_STATUS(onebit_method_choose(comm, &choice), ONEBIT_OK);
    CHECK(choice.method == (blocking ? ONEBIT_METHOD_ONE_BIT : ONEBIT_METHOD_EIGHT_BITS), "%s",
          choice.text);
    CHECK(fabs(choice.expected[1] - (blocking ? 1.25 : 1.01)) < 1e-9, "%g", choice.expected[1]);
    CHECK(!strstr(choice.text, " one bit, not overlapped") == !blocking, "%s", choice.text);
  }
}
Test(method, blocking) { on_ranks(2, check_blocking, NULL); }

/* Checks that the slowest rank determines the choice, by its exchanges and by its computation. On a
 * slow link only few elements are timed, except in two exchanges of one bit. A latency of 40 ms
 * does not count as a slow link. */
static void check_slowest_decides(onebit_comm_t comm, void *context) {
  (void)context;
  const int rank = onebit_comm_rank(comm);
  struct link link = {1.25e6, 1e-4, 0.01 * rank, 0, 0, 0, 0};
  onebit_method_choice_t choice = make_choice(ELEMENTS, rank), other;
  CHECK_STATUS(onebit_method_measure(comm, &choice, time_exchange, &link), ONEBIT_OK);
  CHECK(fabs(choice.exchange[0] - 4 * ELEMENTS / 1.25e6 - 0.02) < 0.05, "%g s", choice.exchange[0]);
  CHECK(link.elements < 5 * (size_t)ELEMENTS / 2 && link.calls < 25, "%zu elements", link.elements);
  CHECK_STATUS(onebit_method_choose(comm, &choice), ONEBIT_OK);
  CHECK(choice.compute == 2, "%g s", choice.compute);
  link = (struct link){1e9, 0.04, 0, 0, 0, 0, 0};
  CHECK_STATUS(onebit_method_measure(comm, &choice, time_exchange, &link), ONEBIT_OK);
  CHECK(choice.exchange[0] < 0.06, "%g s", choice.exchange[0]);
  link = (struct link){1e9, 0.1, 0, 0, 0, 0, 0};
  CHECK_STATUS(onebit_method_measure(comm, &choice, time_exchange, &link), ONEBIT_OK);
  CHECK(link.calls <= 6, "%zu calls of 0.1 s", link.calls);
  const double wire = 4e-9 * ELEMENTS;
  CHECK(fabs(choice.exchange[0] - 0.1 - wire) < 0.2 * (0.1 + wire), "%g s", choice.exchange[0]);
  link = (struct link){1e9, 0.08, 0, 0, 0, 0.4, 0};
  CHECK_STATUS(onebit_method_measure(comm, &choice, time_exchange, &link), ONEBIT_OK);
  CHECK(link.calls <= 5, "%zu calls, of which one dense call shows enough", link.calls);
  CHECK(fabs(choice.exchange[0] - 0.48 - wire) < 0.01, "%g s", choice.exchange[0]);
  /* A slow link with a delay, on which all elements would take seconds. */
  link = (struct link){1.25e6, 0.08, 0, 0, 0, 0.4, 0};
  CHECK_STATUS(onebit_method_measure(comm, &choice, time_exchange, &link), ONEBIT_OK);
  CHECK(link.elements < (size_t)ELEMENTS * 2, "%zu elements", link.elements);
  CHECK(fabs(choice.exchange[0] - 0.48 - 4 * ELEMENTS / 1.25e6) < 0.1, "%g", choice.exchange[0]);
  /* Connections that the first exchange opens do not count as a delay of the link. */
  link = (struct link){1.25e6, 1e-4, 0, 0, 0, 0, 0.3};
  CHECK_STATUS(onebit_method_measure(comm, &choice, time_exchange, &link), ONEBIT_OK);
  CHECK(link.elements < (size_t)ELEMENTS, "%zu elements", link.elements);
  CHECK(fabs(choice.exchange[0] - 4 * ELEMENTS / 1.25e6) < 0.05, "%g s", choice.exchange[0]);
  /* Measured step times count, and a method in use stays unless another one is worth the change. */
  choice = make_choice(ELEMENTS, 1);
  choice.exchange[0] = 1, choice.exchange[1] = 0.25, choice.exchange[2] = 0.03;
  choice.current = ONEBIT_METHOD_EIGHT_BITS;
  other = choice;
  CHECK_STATUS(onebit_method_choose(comm, &choice), ONEBIT_OK);
  CHECK(choice.method == ONEBIT_METHOD_EIGHT_BITS, "%s", choice.text);
  other.step = 2;
  CHECK_STATUS(onebit_method_choose(comm, &other), ONEBIT_OK);
  CHECK(other.method == ONEBIT_METHOD_ONE_BIT && fabs(other.extra[1] - 0.99) < 1e-9, "%s",
        other.text);
}
Test(method, agreed) { on_ranks(3, check_slowest_decides, NULL); }

/* Checks that the time of a training with local steps is computed with its current number of local
 * steps, and that this number stays the same close to the boundaries between choices. */
static void check_local_steps(onebit_comm_t comm, void *context) {
  static const struct {
    double exchange; /* of one bit; the computation is 1 s */
    size_t current, wanted;
  } cases[] = {{1.7, 0, 10},    {7, 0, 10},     {8, 0, 30},      {1.6, 0, 0},
               {1.6, 10, 10},   {1.3, 100, 0},  {6, 30, 30},     {4, 30, 10},
               {9, 10, 10},     {12, 10, 30},   {1.05, 30, 0},   {30, 100, 100},
               {1.38, 100, 10}, {90, 100, 100}, {120, 100, 300}, {0.01, 300, 0}};
  (void)context;
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
    onebit_method_choice_t choice = make_choice(ELEMENTS, 1);
    const double one = cases[k].exchange;
    check_case("case %zu", k);
    choice.methods = (1 << 4) - 1;
    choice.exchange[0] = 30 * one, choice.exchange[1] = 8 * one;
    choice.exchange[2] = choice.exchange[3] = one;
    choice.local_steps = cases[k].current;
    choice.current = cases[k].current ? ONEBIT_METHOD_LOCAL_STEPS : ONEBIT_METHOD_DENSE;
    choice.step = cases[k].current ? 1.25 + one / (double)cases[k].current : 0;
    CHECK_STATUS(onebit_method_choose(comm, &choice), ONEBIT_OK);
    CHECK(choice.local_steps == cases[k].wanted, "%g s, %zu: %s", one, cases[k].current,
          choice.text);
    CHECK(!cases[k].current || fabs(choice.extra[3] - 0.25) < 1e-9, "%g s", choice.extra[3]);
  }
  onebit_method_choice_t choice = make_choice(ELEMENTS, 1);
  choice.current = ONEBIT_METHOD_LOCAL_STEPS;
  choice.local_steps = onebit_comm_rank(comm) ? 100 : 30;
  CHECK_STATUS(onebit_method_choose(comm, &choice), ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("local_steps");
}
Test(method, local) { on_ranks(2, check_local_steps, NULL); }

/* Only methods within a limit on bytes are chosen. In this test the library times its own
 * exchanges. */
static void check_byte_limit(onebit_comm_t comm, void *context) {
  (void)context;
  onebit_method_choice_t choice = make_choice(ELEMENTS, 1);
  /* The bytes per day that each of two ranks sends, at one step per second, without scales. */
  const double one_bit = 86400.0 * ELEMENTS / 8;
  choice.bytes_a_day = 2 * one_bit;
  CHECK_STATUS(onebit_method_choose(comm, &choice), ONEBIT_OK);
  CHECK(choice.method == ONEBIT_METHOD_ONE_BIT && choice.exchange[2] > 0, "%s", choice.text);
  CHECK(isinf(choice.expected[0]) && isinf(choice.expected[1]), "%s", choice.text);
  choice.bytes_a_day = one_bit / 20;
  CHECK_STATUS(onebit_method_choose(comm, &choice), ONEBIT_OK);
  CHECK(choice.method == ONEBIT_METHOD_LOCAL_STEPS && choice.local_steps == 30, "%s", choice.text);
  choice.methods = 7;
  CHECK_STATUS(onebit_method_choose(comm, &choice), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("each of the methods sends more");
}
Test(method, limited) { on_hosts(2, 2, check_byte_limit, NULL); }

static onebit_status_t fail_exchange(void *context, onebit_method_t method, size_t elements,
                                     double *seconds) {
  (void)method, (void)elements;
  *seconds = *(double *)context;
  return *seconds > 0 ? ONEBIT_ERROR_DEVICE : ONEBIT_OK;
}

/* Makes each argument wrong on one rank. All ranks must get an error, and none may wait. */
static void check_wrong_arguments(onebit_comm_t comm, void *context) {
  (void)context;
  const bool wrong = onebit_comm_rank(comm) == 1;
  double seconds = wrong ? 1 : 0;
  onebit_method_choice_t choice = make_choice(ELEMENTS, 1), many[8];
  static const char *const words[] = {"size",     "methods",     "current", "compute",
                                      "exchange", "bytes_a_day", "extra",   "step"};
  for (int k = 0; k < 8; k++)
    many[k] = choice;
  many[0].size = 1, many[1].methods = 16, many[2].current = (onebit_method_t)4;
  many[3].compute = -1, many[4].exchange[1] = NAN, many[5].bytes_a_day = -1;
  many[6].extra[2] = INFINITY, many[7].step = -1;
  for (int k = 0; k < 8; k++) {
    check_case("%s", words[k]);
    CHECK_STATUS(onebit_method_choose(comm, wrong ? &many[k] : &choice),
                 wrong ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
    CHECK_WORDS(wrong ? words[k] : "rank 1 failed with");
  }
  CHECK_STATUS(onebit_method_choose(comm, wrong ? NULL : &choice),
               wrong ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  CHECK_STATUS(onebit_method_measure(comm, wrong ? NULL : &choice, NULL, NULL),
               wrong ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  CHECK_STATUS(onebit_method_measure(comm, &choice, fail_exchange, &seconds),
               wrong ? ONEBIT_ERROR_DEVICE : ONEBIT_ERROR_PEER);
  seconds = wrong ? -1 : 0;
  CHECK_STATUS(onebit_method_measure(comm, &choice, fail_exchange, &seconds),
               wrong ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  choice.elements += wrong;
  CHECK_STATUS(onebit_method_choose(comm, &choice), ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("choice->elements differs");
  CHECK_STATUS(onebit_method_choose(NULL, &choice), ONEBIT_ERROR_ARGUMENT);
  for (size_t elements = 0; elements < 3; elements++) {
    choice = make_choice(elements, 1);
    CHECK_STATUS(onebit_method_choose(comm, &choice), ONEBIT_OK);
    CHECK(choice.method == ONEBIT_METHOD_DENSE, "%s", choice.text);
  }
}
Test(method, refused) { on_ranks(2, check_wrong_arguments, NULL); }
