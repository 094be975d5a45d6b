/*
 * Tests checkpoints of outer steps. A run that is saved after any local step, also with exchanges
 * in flight, must continue with the same bits. On another number of ranks it must begin with the
 * same consensus, momentum, mean drift and mean residual.
 */
#include "tests/support_disk.h"
#include "tests/support_outer.h"

enum { MAX_RANKS = 4, STEPS = 14 };

/* --- To the bit --------------------------------------------------------------------------------*/

struct resume {
  onebit_outer_options_t options;
  int size;
  bool wrong;
  struct saved_parts parts[STEPS + 1]; /* parts[k] is saved after k steps */
  float p[STEPS + 1][MAX_RANKS][OUTER_ELEMENTS];
  onebit_status_t status[STEPS + 1];
};

static void keep_values(struct resume *run, const struct outer_trained *it, int number) {
  memcpy(run->p[number][it->rank], outer_values(it),
         OUTER_ELEMENTS * dtype_size(it->options.parameter_dtype));
}

static void train_and_save(onebit_comm_t comm, void *context) {
  struct resume *run = context;
  struct outer_trained *it = outer_begin(comm, &run->options);
  for (int number = 1; number <= STEPS; number++) {
    const onebit_status_t status = outer_train(it, number, run->wrong);
    keep_values(run, it, number);
    outer_save(it, comm, &run->parts[number]);
    if (it->rank == 0)
      run->status[number] = status;
    synchronize_ranks(comm);
  }
  outer_end(it);
}

static void load_and_train(onebit_comm_t comm, void *context) {
  struct resume *run = context;
  struct saved_parts again = {0};
  struct outer_trained *it = outer_begin(comm, &run->options);
  for (int from = 1; from < STEPS; from += 1 + (run->options.delay == 0)) {
    check_case("after step %d", from);
    CHECK_STATUS(outer_load(it, &run->parts[from]), ONEBIT_OK);
    for (int number = from + 1; number <= from + 5 && number <= STEPS; number++) {
      CHECK_STATUS(outer_train(it, number, run->wrong), run->status[number]);
      CHECK_BITS("the parameters", outer_values(it), run->p[number][it->rank], OUTER_ELEMENTS,
                 it->options.parameter_dtype);
    }
    const int end = from + 5 < STEPS ? from + 5 : STEPS, k = it->rank;
    outer_save_part(it, &again);
    CHECK(again.bytes[k] == run->parts[end].bytes[k] &&
              memcmp(again.memory[k], run->parts[end].memory[k], again.bytes[k]) == 0,
          "the part that is saved after step %d is another one", end);
  }
  free(again.memory[it->rank]);
  outer_end(it);
}

static void check_resumed_run(const onebit_outer_options_t *options, int size, bool wrong) {
  struct resume *run = allocate(1, sizeof *run);
  run->options = *options;
  run->size = size;
  run->wrong = wrong;
  on_ranks(size, train_and_save, run);
  on_ranks(size, load_and_train, run);
  for (int number = 0; number <= STEPS; number++)
    free_parts(&run->parts[number]);
  free(run);
}

Test(outer_checkpoint, goes_on_to_the_bit) {
  static const int widths[] = {1, 4, ONEBIT_OUTER_DENSE, ONEBIT_OUTER_SPARSE};
  for (size_t k = 0; k < 4; k++)
    for (size_t delay = 0; delay < 3; delay += 2) {
      onebit_outer_options_t options = outer_options(widths[k], (onebit_outer_rule_t)(k % 3));
      options.delay = delay;
      options.fragments = 1 + delay;
      options.weighted = k % 2 == 0;
      check_resumed_run(&options, 3 - (int)(k % 2), false);
    }
}

Test(outer_checkpoint, sixteen_bits_and_one_rank) {
  onebit_outer_options_t options = outer_options(1, ONEBIT_OUTER_MOMENTUM);
  options.parameter_dtype = ONEBIT_BFLOAT16;
  options.delay = 3;
  options.fragments = 2;
  check_resumed_run(&options, 2, false);
  check_resumed_run(&options, 1, false);
}

Test(outer_checkpoint, an_exchange_that_all_will_skip) {
  onebit_outer_options_t options = outer_options(1, ONEBIT_OUTER_MEAN);
  options.delay = 3;
  check_resumed_run(&options, 3, true);
  options.weighted = 1;
  check_resumed_run(&options, 3, true);
}

/* --- Other numbers of ranks --------------------------------------------------------------------*/

struct elastic {
  onebit_outer_options_t options;
  int steps;     /* number of steps before the save */
  bool infinite; /* makes parameter 400 on rank 1 infinite before the save */
  struct saved_parts before, after;
};

static void save_on_ranks(onebit_comm_t comm, void *context) {
  struct elastic *run = context;
  struct outer_trained *it = outer_begin(comm, &run->options);
  outer_train_to(it, 1, run->steps);
  it->p[400] = run->infinite && it->rank == 1 ? INFINITY : it->p[400];
  outer_save(it, comm, &run->before);
  outer_end(it);
}

static void load_on_ranks(onebit_comm_t comm, void *context) {
  struct elastic *run = context;
  struct outer_trained *it = outer_begin(comm, &run->options);
  CHECK_STATUS(outer_load(it, &run->before), ONEBIT_OK);
  outer_save(it, comm, &run->after);
  outer_train_to(it, run->steps + 1, run->steps + 9);
  CHECK_STATUS(onebit_outer_synchronize(it->outer), ONEBIT_OK);
  const onebit_outer_info_t info = outer_info(it->outer);
  CHECK(info.steps == (uint64_t)run->steps + 9, "%ju steps", (uintmax_t)info.steps);
  outer_end(it);
}

static double rank_weight(const struct saved_parts *parts, int k) {
  double weight;
  const struct section numbers = part_section(parts->memory[k], 0);
  memcpy(&weight, (const char *)parts->memory[k] + numbers.offset + 8 * (3 + 4), sizeof weight);
  return weight;
}

/* Returns true if the parameters contain the residual. Number 10 of a rank's part tells this. */
static bool parameters_keep_residual(const struct saved_parts *parts) {
  const struct section numbers = part_section(parts->memory[0], 0);
  return part_number(parts->memory[0], (size_t)numbers.offset + 8 * (3 + 7)) != 0;
}

/* Computes the mean result of the local steps, relative to the consensus. The residuals that
 * parameters contain are removed, and the mean is weighted with the ranks' weights. */
static void drift_means(const struct saved_parts *parts, bool weighted,
                        double means[OUTER_ELEMENTS]) {
  double weights = 0;
  for (int k = 0; k < parts->count; k++)
    weights += weighted ? rank_weight(parts, k) : 1;
  memset(means, 0, OUTER_ELEMENTS * sizeof *means);
  for (int k = 0; k < parts->count; k++) {
    float *p = part_values(parts, k, SECTION_PARAMETERS);
    float *e = part_values(parts, k, SECTION_WORKER);
    const double weight = (weighted ? rank_weight(parts, k) : 1) / weights;
    for (size_t i = 0; i < OUTER_ELEMENTS; i++)
      means[i] += weight * ((double)p[i] +
                            (parameters_keep_residual(parts) && !isnan(e[i]) ? (double)e[i] : 0));
    free(p);
    free(e);
  }
}

static void check_means(const struct elastic *run) {
  double *held[] = {outer_mean_residual(&run->before), outer_mean_residual(&run->after)};
  double largest = 0, drift[2][OUTER_ELEMENTS];
  const bool weighted = run->options.weighted && rank_weight(&run->before, 0) > 0;
  drift_means(&run->before, weighted, drift[0]);
  drift_means(&run->after, weighted, drift[1]);
  CHECK(parameters_keep_residual(&run->before) == parameters_keep_residual(&run->after),
        "where the residual is");
  for (size_t i = 0; i < OUTER_ELEMENTS; i++) {
    const double before = held[0][i], after = held[1][i];
    CHECK(fabs(before - after) <= 1e-6, "residual[%zu]: %g became %g", i, before, after);
    largest = fabs(before) > largest ? fabs(before) : largest;
    CHECK(fabs(drift[0][i] - drift[1][i]) <= 1e-6, "drift[%zu]: %g became %g", i, drift[0][i],
          drift[1][i]);
  }
  CHECK(largest > 1e-4, "there is a residual");
  free(held[0]);
  free(held[1]);
}

static void check_other_rank_count(const onebit_outer_options_t *options, int steps, int from,
                                   int to) {
  struct elastic *run = allocate(1, sizeof *run);
  run->options = *options;
  run->steps = steps;
  check_case("%d ranks become %d, after %d steps", from, to, steps);
  on_ranks(from, save_on_ranks, run);
  on_ranks(to, load_on_ranks, run);
  check_same_values("the consensus", SECTION_CONSENSUS, &run->before, &run->after);
  if (options->rule != ONEBIT_OUTER_MEAN)
    check_same_values("the momentum", SECTION_OUTER_MOMENTUM, &run->before, &run->after);
  check_means(run);
  checks_must_hold();
  free_parts(&run->before);
  free_parts(&run->after);
  free(run);
}

Test(outer_checkpoint, other_numbers_of_ranks) {
  static const int pairs[][2] = {{3, 2}, {2, 4}, {4, 1}, {1, 3}};
  for (size_t k = 0; k < 4; k++)
    for (int weighted = 0; weighted < 2; weighted++) {
      onebit_outer_options_t options = outer_options(k == 2 ? 4 : 1, ONEBIT_OUTER_MOMENTUM);
      options.weighted = weighted;
      check_other_rank_count(&options, 6, pairs[k][0], pairs[k][1]);
      options.bits = ONEBIT_OUTER_SPARSE;
      options.delay = 3;
      check_other_rank_count(&options, 5, pairs[k][0], pairs[k][1]);
    }
}

/* An element of one rank's drift is not finite when it is saved. After loading, this element must
 * start at the consensus. */
static void load_infinite(onebit_comm_t comm, void *context) {
  struct elastic *run = context;
  float x[200];
  struct outer_trained *it = outer_begin(comm, &run->options);
  CHECK_STATUS(outer_load(it, &run->before), ONEBIT_OK);
  CHECK_STATUS(onebit_outer_get_consensus(it->outer, 3, x), ONEBIT_OK);
  CHECK(it->p[400] == x[400 - 398], "%g, not %g", (double)it->p[400], (double)x[2]);
  CHECK(it->p[401] != x[401 - 398], "more than that element was changed");
  outer_end(it);
}

Test(outer_checkpoint, what_is_not_finite_begins_at_the_consensus) {
  struct elastic *run = allocate(1, sizeof *run);
  run->options = outer_options(1, ONEBIT_OUTER_MEAN);
  run->steps = 5;
  run->infinite = true;
  on_ranks(3, save_on_ranks, run);
  on_ranks(2, load_infinite, run);
  free_parts(&run->before);
  free(run);
}

/* Loads into a run whose rounds have another number of steps. The fragment that is exchanged next
 * must stay the same. */
static void load_with_other_rounds(onebit_comm_t comm, void *context) {
  struct elastic *run = context;
  struct outer_trained *it = allocate(1, sizeof *it);
  onebit_outer_options_t options = run->options;
  for (size_t h = 2; h <= 9; h += 7) {
    options.local_steps = h;
    options.delay = 0;
    options.bits = 8;
    outer_create(it, comm, &options);
    CHECK_STATUS(outer_load(it, &run->before), ONEBIT_OK);
    const uint64_t before = outer_info(it->outer).exchanges;
    for (int number = 0; number < 9; number++)
      CHECK_STATUS(outer_train(it, number, false), ONEBIT_OK);
    const uint64_t made = outer_info(it->outer).exchanges - before;
    CHECK(h == 2 ? made >= 9 && made <= 11 : made >= 2 && made <= 4,
          "%ju exchanges in rounds of %zu", (uintmax_t)made, h);
    onebit_outer_destroy(it->outer);
  }
  free(it);
}

Test(outer_checkpoint, rounds_of_another_length) {
  struct elastic *run = allocate(1, sizeof *run);
  run->options = outer_options(1, ONEBIT_OUTER_MEAN);
  run->options.fragments = 2;
  run->options.delay = 3;
  run->options.weighted = 1;
  run->steps = 7;
  on_ranks(3, save_on_ranks, run);
  on_ranks(3, load_with_other_rounds, run);
  on_ranks(2, load_with_other_rounds, run);
  free_parts(&run->before);
  free(run);
}

/* --- Files -------------------------------------------------------------------------------------*/

static void save_and_load_files(onebit_comm_t comm, void *context) {
  const char *path = context;
  onebit_outer_options_t options = outer_options(1, ONEBIT_OUTER_MEAN);
  options.delay = 3;
  struct outer_trained *it = outer_begin(comm, &options);
  struct outer_trained *other = outer_begin(comm, &options);
  outer_train_to(it, 1, 5);
  CHECK_STATUS(onebit_outer_save_files(it->outer, path), ONEBIT_OK);
  CHECK_STATUS(onebit_outer_load_files(other->outer, path), ONEBIT_OK);
  for (int number = 6; number <= 12; number++) {
    CHECK_STATUS(outer_train(it, number, false), ONEBIT_OK);
    CHECK_STATUS(outer_train(other, number, false), ONEBIT_OK);
    CHECK_BITS("the parameters", other->p, it->p, OUTER_ELEMENTS, ONEBIT_FLOAT32);
  }
  onebit_outer_destroy(other->outer);
  const bool well = onebit_comm_rank(comm) != 1;
  CHECK_STATUS(onebit_outer_save_files(it->outer, well ? path : NULL),
               well ? ONEBIT_ERROR_PEER : ONEBIT_ERROR_ARGUMENT);
  CHECK_STATUS(onebit_outer_load_files(it->outer, well ? path : ""),
               well ? ONEBIT_ERROR_PEER : ONEBIT_ERROR_ARGUMENT);
  CHECK_STATUS(onebit_outer_save_files(it->outer, path), ONEBIT_OK);
  CHECK_STATUS(onebit_outer_load_files(it->outer, path), ONEBIT_OK);
  outer_end(it);
  free(other);
}

/* Ranks that are not in the same exchange must get an error, instead of waiting for each other. */
static void save_at_different_steps(onebit_comm_t comm, void *context) {
  onebit_outer_options_t options = outer_options(1, ONEBIT_OUTER_MEAN);
  options.delay = 3;
  options.weighted = 1;
  struct outer_trained *it = outer_begin(comm, &options);
  CHECK_STATUS(onebit_outer_save_files(it->outer, context), ONEBIT_OK);
  outer_train_to(it, 1, (it->rank == 1 ? 3 : 5));
  CHECK_STATUS(onebit_outer_save_files(it->outer, context), ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("the number of exchanges that have begun");
  CHECK_STATUS(onebit_outer_load_files(it->outer, context), ONEBIT_ERROR_MISMATCH);
  if (it->rank == 1)
    outer_train_to(it, 4, 5);
  CHECK_STATUS(onebit_outer_save_files(it->outer, context), ONEBIT_OK);
  outer_end(it);
}

Test(outer_checkpoint, in_files) {
  struct directories directories = directories_create();
  on_ranks(3, save_and_load_files, directories.saved);
  directories_remove(&directories);
  directories = directories_create();
  on_ranks(3, save_at_different_steps, directories.saved);
  directories_remove(&directories);
}

/* Tests that checkpoints of outer steps that are damaged, or of another kind of object, are refused
 * and change nothing. */

static void check_load_refused(struct outer_trained *it, const struct saved_parts *saved,
                               const char *message) {
  struct saved_parts now = {0};
  CHECK_STATUS(outer_load(it, saved), ONEBIT_ERROR_CHECKPOINT);
  CHECK_WORDS(message);
  outer_save_part(it, &now);
  CHECK(part_number(now.memory[0], PART_STEPS) == 0, "a refused part has changed something");
  free(now.memory[0]);
}

/* Saves the part of a single rank in the middle of an exchange. */
static struct saved_parts small_part(onebit_comm_t comm, const onebit_outer_options_t *options) {
  struct saved_parts parts = {0};
  struct outer_trained *it = outer_begin(comm, options);
  outer_train_to(it, 1, 5);
  outer_save(it, comm, &parts);
  outer_end(it);
  return parts;
}

static onebit_outer_options_t small_options(void) {
  onebit_outer_options_t options = outer_options(1, ONEBIT_OUTER_MOMENTUM);
  options.delay = 3;
  return options;
}

Test(outer_checkpoint_wrong, damage_is_refused) {
  const onebit_outer_options_t options = small_options();
  onebit_comm_t comm = self_comm();
  struct saved_parts parts = small_part(comm, &options);
  struct outer_trained *it = outer_begin(comm, &options);
  unsigned char *part = parts.memory[0];
  const size_t bytes = parts.bytes[0];
  for (size_t at = 0; at < bytes; at += at < 500 ? 1 : 61) {
    check_case("byte %zu", at);
    part[at] ^= (unsigned char)(1 << at % 8);
    check_load_refused(it, &parts, "part 0: ");
    part[at] ^= (unsigned char)(1 << at % 8);
  }
  for (size_t left = 0; left < bytes; left += left < 300 ? 37 : 1999) {
    parts.bytes[0] = left;
    check_load_refused(it, &parts, "truncated");
  }
  parts.bytes[0] = bytes;
  part[PART_VERSION] = 9;
  check_load_refused(it, &parts,
                     "it has format version 9, but this library reads versions up to 2");
  part[PART_VERSION] = 1;
  CHECK_STATUS(outer_load(it, &parts), ONEBIT_OK);
  outer_end(it);
  free_parts(&parts);
  onebit_comm_destroy(comm);
}

static void set_number(struct saved_parts *parts, size_t place, uint64_t number) {
  const struct section numbers = part_section(parts->memory[0], 0);
  part_set(parts->memory[0], (size_t)numbers.offset + 8 * place, number);
  part_sign_section(parts->memory[0], 0);
  part_sign(parts->memory[0]);
}

/* Loads parts that have correct checksums but wrong numbers. */
Test(outer_checkpoint_wrong, numbers_of_no_state_are_refused) {
  const onebit_outer_options_t options = small_options();
  static const struct {
    size_t place;
    uint64_t number;
    const char *message;
  } rows[] = {{1, 4, "step 4 of a round of 4 steps"},
              {2, 0, "of a round of 0 steps"},
              {3, 5, "fragment 0 has 598 elements here, but 5 in the checkpoint"},
              {4, 3, "an impossible state"},
              {5, UINT64_MAX, "an impossible state"},
              {6, 2, "an impossible state"},
              {7, UINT64_MAX, "an impossible state"},
              {8, (uint64_t)1 << 63 | 1, "an impossible state"},
              {9, UINT64_MAX, "an impossible state"}};
  onebit_comm_t comm = self_comm();
  struct saved_parts parts = small_part(comm, &options);
  struct outer_trained *it = outer_begin(comm, &options);
  for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
    const struct section numbers = part_section(parts.memory[0], 0);
    const uint64_t sound = part_number(parts.memory[0], (size_t)numbers.offset + 8 * rows[k].place);
    check_case("number %zu", rows[k].place);
    set_number(&parts, rows[k].place, rows[k].number);
    check_load_refused(it, &parts, rows[k].message);
    set_number(&parts, rows[k].place, sound);
  }
  CHECK_STATUS(outer_load(it, &parts), ONEBIT_OK);
  outer_end(it);
  free_parts(&parts);
  onebit_comm_destroy(comm);
}

Test(outer_checkpoint_wrong, others_are_refused) {
  onebit_comm_t comm = self_comm();
  onebit_outer_options_t options = small_options();
  struct saved_parts parts = small_part(comm, &options);
  struct outer_trained *it = allocate(1, sizeof *it);
  onebit_tensor_t tensor = {.parameter = it->p, .count = 5};
  onebit_outer_t outer;
#define REFUSE(message)                                                                            \
  do {                                                                                             \
    outer_create(it, comm, &options);                                                              \
    check_load_refused(it, &parts, message);                                                       \
    onebit_outer_destroy(it->outer);                                                               \
    options = small_options();                                                                     \
  } while (0)
  options.rule = ONEBIT_OUTER_MEAN;
  REFUSE("saved with outer momentum, but is loaded without");
  options.weighted = 1;
  REFUSE("it was saved without weights, but is loaded with weights");
  options.fragments = 2;
  REFUSE("it was saved with 1 fragments, but is loaded with 2");
  CHECK_STATUS(onebit_outer_create(comm, &tensor, 1, &options, &outer), ONEBIT_OK);
  it->outer = outer;
  check_load_refused(it, &parts, "it was saved with 4 tensors, but loaded into 1");
  onebit_outer_destroy(outer);
  struct saved_parts twice = {.count = 2,
                              .memory = {parts.memory[0], parts.memory[0]},
                              .bytes = {parts.bytes[0], parts.bytes[0]}};
  outer_create(it, comm, &options);
  check_load_refused(it, &twice, "it was saved by 1 ranks, but the number of parts given is 2");
  memcpy((char *)parts.memory[0] + PART_KIND, "adam\0", 6);
  part_sign(parts.memory[0]);
  check_load_refused(it, &parts, "it belongs to another kind: saved by adam, loaded by outer");
  outer_end(it);
  free_parts(&parts);
  onebit_comm_destroy(comm);
}
