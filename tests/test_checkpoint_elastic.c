/*
 * Tests loading checkpoints on another number of ranks. State that all ranks share must keep its
 * bits. Each worker residual must become the mean of the saved ones, and server residuals must stay
 * with their elements. This also holds if options have changed.
 */
#include "compression/numerics.h"
#include "tests/support_checkpoint.h"

static const struct checkpoint_case *find_case(const char *name) {
  for (size_t k = 0; k < checkpoint_cases_count; k++)
    if (strcmp(checkpoint_cases[k].name, name) == 0)
      return &checkpoint_cases[k];
  cr_assert_fail("no case is called %s", name);
  return NULL;
}

static bool is_apart(const struct saved_parts *parts) {
  uint32_t apart;
  memcpy(&apart, (const char *)parts->memory[0] + PART_APART, sizeof apart);
  return apart;
}

/* Checks that the caller's parameters are the saved ones, rounded to their dtype. */
static void check_rounded(const void *parameters, const double *wanted, onebit_dtype_t dtype) {
  void *rounded = allocate(TRAINEE_ELEMENTS, sizeof(float));
  for (size_t i = 0; i < TRAINEE_ELEMENTS; i++)
    ob_store(rounded, i, dtype, ob_bound((float)wanted[i], dtype));
  CHECK_BITS("parameters", parameters, rounded, TRAINEE_ELEMENTS, dtype);
  free(rounded);
}

/* A run in which other ranks load saved parts, and then save their state again. */
struct loading_run {
  const struct checkpoint_case *what;
  const struct saved_parts *from;
  struct saved_parts *to;
  int steps;                                            /* steps to make after the load */
  unsigned char last[TRAINEE_ELEMENTS * sizeof(float)]; /* rank 0's parameters after these steps */
};

/* Checks that all ranks have the same parameters, unless they have made local steps. */
static void check_equal_parameters(struct loading_run *run, struct trainee *trainee,
                                   onebit_comm_t comm) {
  const onebit_optimizer_info_t info = optimizer_info(trainee->optimizer);
  if (trainee->rank == 0)
    memcpy(run->last, trainee->parameters, sizeof run->last);
  synchronize_ranks(comm);
  if (info.synchronized)
    CHECK_BITS("parameters of all ranks", trainee->parameters, run->last, TRAINEE_ELEMENTS,
               run->what->common.parameter_dtype);
}

static void load_and_save(onebit_comm_t comm, void *context) {
  struct loading_run *run = context;
  struct trainee trainee = trainee_create(comm, run->what, 1);
  check_case("%s", run->what->name);
  CHECK_STATUS(trainee_load(&trainee, run->from), ONEBIT_OK);
  double *parameters = parts_mean(run->from, SECTION_PARAMETERS);
  onebit_dtype_t dtype = run->what->common.parameter_dtype;
  uint64_t steps = part_number(run->from->memory[0], PART_STEPS);
  if (run->what->size != run->from->count || !is_apart(run->from))
    check_rounded(trainee.parameters, parameters, dtype);
  free(parameters);
  trainee_save(&trainee, comm, run->to);
  for (int step = 0; step < run->steps; step++)
    trainee_step(&trainee, (int)steps + step);
  check_equal_parameters(run, &trainee, comm);
  trainee_destroy(&trainee);
}

static void load_into(const struct checkpoint_case *what, const struct saved_parts *from,
                      struct saved_parts *to) {
  struct loading_run run = {.what = what, .from = from, .to = to, .steps = 3};
  *to = (struct saved_parts){0};
  on_hosts(what->size, what->hosts ? what->hosts : 1, load_and_save, &run);
}

/* Checks that the mean over the ranks of arrays that each rank has alone has not changed, except
 * for rounding. */
static void check_mean(const struct saved_parts *from, const struct saved_parts *to,
                       uint32_t what) {
  double *wanted = parts_mean(from, what), *got = parts_mean(to, what);
  for (size_t i = 0; i < TRAINEE_ELEMENTS; i++)
    if (!CHECK(isnan(wanted[i]) == isnan(got[i]) &&
                   (isnan(got[i]) || fabs(got[i] - wanted[i]) <= 1e-6 * fabs(wanted[i])),
               "section %d, element %zu: the mean is %.9g, not %.9g", (int)what, i, got[i],
               wanted[i]))
      break;
  free(wanted);
  free(got);
}

/* Checks a load that keeps the block size. Arrays that all ranks share must be equal, and arrays
 * that each rank has alone must have the same mean. */
static void check_remapped(const struct saved_parts *from, const struct saved_parts *to) {
  for (uint32_t what = SECTION_PARAMETERS; what <= SECTION_SERVER; what++) {
    bool moves = what == SECTION_PARAMETERS || what == SECTION_MOMENTUM || what == SECTION_MOVED;
    if (what == SECTION_WORKER || (moves && is_apart(from)))
      check_mean(from, to, what);
    else
      check_same_values("shared values", what, from, to);
  }
}

/* Loads a case's checkpoints of steps 0, 3, 6, ... on another number of ranks, whose checkpoint is
 * then loaded on the first number again. */
static void check_load_on_other_ranks(struct checkpoint_case what, int size, int hosts) {
  struct saved_parts from, to, back;
  what.skips = false;
  struct checkpoint_case other = what;
  other.size = size;
  other.hosts = hosts;
  other.common.schedule = hosts > 1 ? ONEBIT_SCHEDULE_HIERARCHICAL : ONEBIT_SCHEDULE_EXCHANGE;
  for (int steps = 0; steps <= what.steps; steps += 3) {
    check_case("%s, %d ranks to %d, step %d", what.name, what.size, size, steps);
    save_after(&what, steps, &from);
    load_into(&other, &from, &to);
    check_remapped(&from, &to);
    load_into(&what, &to, &back);
    check_remapped(&from, &back);
    checks_must_hold();
    free_parts(&from);
    free_parts(&to);
    free_parts(&back);
  }
}

Test(checkpoint_elastic, other_numbers_of_ranks) {
  static const int sizes[] = {1, 2, 3, 4, 8, 13};
  for (size_t from = 0; from < 5; from++)
    for (size_t to = 0; to < 6; to++) {
      struct checkpoint_case what = *find_case("adam, uncompressed tensors");
      what.size = sizes[from];
      if (test_wanted(from + to))
        check_load_on_other_ranks(what, sizes[to], 1);
    }
}

Test(checkpoint_elastic, other_numbers_of_ranks_of_every_optimizer) {
  static const char *const names[] = {"adam, steps",
                                      "adam, buckets",
                                      "adam, automatic freeze",
                                      "adam in bfloat16",
                                      "adam, compressed warm-up",
                                      "adam, replicated servers",
                                      "efficient adam, replicated servers",
                                      "adam, shards of steps",
                                      "adam, shards of parameters in bfloat16",
                                      "lamb",
                                      "0/1 adam",
                                      "0/1 adam, uncompressed tensors",
                                      "momentum",
                                      "lion",
                                      "lion, uncompressed tensors"};
  for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
    check_load_on_other_ranks(*find_case(names[k]), 1, 1);
    check_load_on_other_ranks(*find_case(names[k]), 5, 1);
  }
}

Test(checkpoint_elastic, other_hosts) {
  check_load_on_other_ranks(*find_case("adam, hosts"), 4, 1);
  check_load_on_other_ranks(*find_case("adam, hosts"), 3, 1);
  check_load_on_other_ranks(*find_case("adam, hosts"), 6, 3);
  check_load_on_other_ranks(*find_case("adam, hosts"), 6, 2);
  check_load_on_other_ranks(*find_case("adam, three hosts"), 4, 2);
  check_load_on_other_ranks(*find_case("adam, steps"), 4, 2);
  check_load_on_other_ranks(*find_case("lamb, hosts"), 6, 3);
  check_load_on_other_ranks(*find_case("lamb, hosts, compressed warm-up"), 6, 3);
  check_load_on_other_ranks(*find_case("0/1 adam, hosts"), 2, 1);
  check_load_on_other_ranks(*find_case("lion, hosts"), 3, 1);
  check_load_on_other_ranks(*find_case("lion, hosts"), 6, 3);
}

/* --- Other options */

/* A checkpoint that is continued twice: with the run's own options, and with other options, which
 * must change no bit. */
struct options_run {
  const struct checkpoint_case *what, *other;
  const struct saved_parts *from;
  int steps, alike; /* alike: the step up to which both runs have equal parameters */
};

static void compare_options(onebit_comm_t comm, void *context) {
  struct options_run *run = context;
  struct trainee one = trainee_create(comm, run->what, 1);
  struct trainee two = trainee_create(comm, run->other, 2);
  check_case("%s as %s", run->what->name, run->other->name);
  CHECK_STATUS(trainee_load(&one, run->from), ONEBIT_OK);
  CHECK_STATUS(trainee_load(&two, run->from), ONEBIT_OK);
  for (int step = run->steps; step < run->what->steps && step <= run->alike; step++) {
    trainee_step(&one, step);
    trainee_step(&two, step);
    if (step < run->alike)
      CHECK_BITS("parameters", two.parameters, one.parameters, TRAINEE_ELEMENTS, ONEBIT_FLOAT32);
  }
  trainee_destroy(&one);
  trainee_destroy(&two);
}

static void check_options(const struct checkpoint_case *what, onebit_optimizer_options_t common) {
  struct checkpoint_case other = *what;
  struct saved_parts from;
  other.common = common;
  for (int steps = 1; steps < what->steps; steps += 2) {
    save_after(what, steps, &from);
    struct options_run run = {what, &other, &from, steps, what->steps};
    on_hosts(what->size, what->hosts ? what->hosts : 1, compare_options, &run);
    free_parts(&from);
  }
}

Test(checkpoint_elastic, options_on_which_no_bit_depends) {
  static const char *const names[] = {"adam", "adam, steps", "adam, uncompressed tensors"};
  for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
    const struct checkpoint_case *what = find_case(names[k]);
    check_options(what, (onebit_optimizer_options_t){.bucket_size = 100, .threads = 3});
    check_options(what, (onebit_optimizer_options_t){.chunk_size = 128});
  }
  const struct checkpoint_case *what = find_case("adam, small blocks and chunks");
  check_options(what, (onebit_optimizer_options_t){.block_size = 64, .bucket_size = 1});
  for (size_t k = 0; k < test_codecs_count; k++)
    if (use_codec(test_codecs[k]))
      check_options(what, (onebit_optimizer_options_t){.block_size = 64});
  use_codec("");
}

/* Returns the next compensated values: beta1 times the momentum, plus the residual. Loading
 * preserves these values even if messages cannot represent the momentum. */
static double *compensated_values(const struct saved_parts *parts) {
  float *momentum = parts_values(parts, SECTION_MOMENTUM);
  double *errors = parts_mean(parts, SECTION_WORKER);
  for (size_t i = 0; i < TRAINEE_ELEMENTS; i++)
    errors[i] += (double)0.9f * (double)momentum[i];
  free(momentum);
  return errors;
}

static void check_compensated(struct checkpoint_case what, struct checkpoint_case other) {
  struct saved_parts from, to;
  save_after(&what, what.steps, &from);
  load_into(&other, &from, &to);
  check_same_values("parameters", SECTION_PARAMETERS, &from, &to);
  check_same_values("variance", SECTION_VARIANCE, &from, &to);
  float *before = parts_values(&from, SECTION_MOMENTUM),
        *after = parts_values(&to, SECTION_MOMENTUM);
  double *wanted = compensated_values(&from), *got = compensated_values(&to);
  size_t other_momentum = 0;
  for (size_t i = 0; i < TRAINEE_ELEMENTS; i++) {
    other_momentum += before[i] != after[i];
    if (!CHECK(fabs(got[i] - wanted[i]) <= 1e-5 * fabs(wanted[i]) + 1e-7 * fabs((double)before[i]),
               "element %zu: %.9g is compensated, not %.9g", i, got[i], wanted[i]))
      break;
  }
  CHECK(other_momentum > 100, "messages represent the momentum exactly");
  checks_must_hold();
  free(before);
  free(after);
  free(wanted);
  free(got);
  free_parts(&from);
  free_parts(&to);
}

Test(checkpoint_elastic, momentum_that_messages_cannot_say) {
  const struct checkpoint_case *what = find_case("adam");
  struct checkpoint_case other = *what;
  other.common.block_size = 96;
  check_compensated(*what, other);
  other.common.bucket_size = 500;
  other.common.block_size = ONEBIT_BLOCK_BUFFER;
  check_compensated(*what, other);
  other = *find_case("adam, one scale");
  other.size = 5;
  check_compensated(*find_case("adam, one scale"), other);
  other = *find_case("adam, deepspeed");
  struct checkpoint_case deepspeed = other;
  deepspeed.skips = other.skips = false;
  deepspeed.uncompressed = other.uncompressed = 0;
  other.size = 2;
  check_compensated(deepspeed, other);
  other = *find_case("lamb, one scale");
  other.size = 3;
  check_compensated(*find_case("lamb, one scale"), other);
  struct checkpoint_case fused = *find_case("lamb, deepspeed");
  other = fused;
  other.size = 5;
  check_compensated(fused, other);
}

/* Divides by the factors with which LAMB scales the momentum in messages. This factor is the last
 * of LAMB's three per-tensor numbers. */
static void divide_by_scalings(const struct saved_parts *parts, double *values) {
  const char *part = parts->memory[0];
  size_t tensors = part_number(part, PART_TENSORS), i = 0;
  struct section numbers = part_section(part, 0);
  CHECK(numbers.what == SECTION_NUMBERS && numbers.count == 3 * tensors, "other numbers");
  for (size_t t = 0; t < tensors; t++) {
    double scaling;
    memcpy(&scaling, part + numbers.offset + (2 * tensors + t) * 8, sizeof scaling);
    for (size_t k = part_number(part, PART_ROWS + t * 16); k-- > 0; i++)
      values[i] /= scaling;
  }
}

/* In profile deepspeed a single rank does not compress. Checks that loading on one rank gives it
 * beta1 times the momentum plus all residuals, without LAMB's scaling, and that loading on several
 * ranks again preserves this sum. */
static void check_single_rank(struct checkpoint_case many, const struct checkpoint_case *one) {
  struct saved_parts from, to, back;
  many.skips = false;
  many.uncompressed = 0;
  save_after(&many, many.steps, &from);
  load_into(one, &from, &to);
  load_into(&many, &to, &back);
  double *wanted = compensated_values(&from), *after = compensated_values(&back);
  double *size = allocate(TRAINEE_ELEMENTS, sizeof *size);
  float *server = parts_values(&from, SECTION_SERVER), *got = parts_values(&to, SECTION_MOMENTUM);
  float *momentum = parts_values(&from, SECTION_MOMENTUM);
  for (size_t i = 0; i < TRAINEE_ELEMENTS; i++) {
    size[i] = fabs(wanted[i]) + fabs((double)server[i]) + fabs((double)momentum[i]);
    wanted[i] += (double)server[i];
  }
  if (many.method == &ob_method_lamb) {
    divide_by_scalings(&from, wanted);
    divide_by_scalings(&from, size);
  }
  for (size_t i = 0; i < TRAINEE_ELEMENTS; i++)
    if (!CHECK(fabs((double)got[i] - wanted[i]) <= 1e-6 * size[i] &&
                   fabs(after[i] - wanted[i]) <= 1e-6 * size[i],
               "element %zu: %.9g and then %.9g is kept, not %.9g", i, (double)got[i], after[i],
               wanted[i]))
      break;
  checks_must_hold();
  free(wanted);
  free(after);
  free(size);
  free(server);
  free(momentum);
  free(got);
  free_parts(&from);
  free_parts(&to);
  free_parts(&back);
}

Test(checkpoint_elastic, one_rank_that_does_not_compress) {
  check_single_rank(*find_case("adam, deepspeed"), find_case("adam, deepspeed alone"));
  check_single_rank(*find_case("lamb, deepspeed"), find_case("lamb, deepspeed alone"));
}

/* The warm-up is the same with and without shards, so a run without shards can load a warm-up
 * checkpoint of a run with shards, and vice versa. */
Test(checkpoint_elastic, shards_from_a_warm_up_without) {
  static const char *const names[] = {"adam, uncompressed tensors", "adam, shards of steps",
                                      "adam, shards of parameters"};
  for (int from = 0; from < 3; from++)
    for (int to = 0; to < 3; to++) {
      struct saved_parts parts;
      struct checkpoint_case what = *find_case(names[from]), other = *find_case(names[to]);
      what.uncompressed = other.uncompressed = 1 << 1;
      what.skips = other.skips = false;
      save_after(&what, 2, &parts);
      struct options_run run = {&what, &other, &parts, 2, (int)what.freeze_step};
      on_ranks(what.size, compare_options, &run);
      free_parts(&parts);
    }
}
