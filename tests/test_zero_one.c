/*
 * 0/1 Adam equals the oracle's in every bit of every rank's parameters after every step: variance
 * stage, freeze, local and synchronisation steps; for groups of 1 to 7 ranks.
 */
#include "tests/support_zero_one.h"

static void check_case_of_zero_one(const struct zero_one_case *what) {
  struct zero_one_run run = zero_one_prepare(what);
  on_hosts(what->size, what->hosts ? what->hosts : 1, zero_one_on_rank, &run);
  zero_one_release(&run);
}

/* A case is a choice of each of these: every two meet in some row. */
enum {
  TENSORS,
  GROUP,
  PROFILE,
  CUT,
  NUMBERS,
  FREEZE,
  INTERVALS,
  BUCKET,
  PARTS,
  POISON,
  DENSE,
  ABSENT,
  GRADIENTS,
  PARAMETERS,
  CODEC,
  THREADS,
  CHOICES
};

static const struct adam_tensors *const lists[] = {&adam_tensors_odd, &adam_tensors_one,
                                                   &adam_tensors_many_words, &adam_tensors_tiny,
                                                   &adam_tensors_none};
/* Ranks and hosts; 0: in the schedule of one host. */
static const int groups[][2] = {{1, 0}, {2, 0}, {3, 0}, {4, 0}, {7, 0},
                                {4, 2}, {6, 3}, {6, 2}, {3, 1}};
/* After one step, after a step in bits, in the last step, and never in this run. */
static const size_t freezes[] = {1, 2, 7, 10, 30, 31};
/* Scalers of 1, one that is never reached, clippers that are no power of two, and 1: the ranks meet
 * in every step. */
static const size_t intervals[][3] = {{2, 3, 4}, {1, 1, 6},     {3, 2, 5},
                                      {2, 1, 1}, {100, 100, 3}, {1, 4, 7}};
static const size_t bucket_sizes[] = {0, 1, 100, 2000, 5000};
static const float poisons[] = {0, NAN, INFINITY, -INFINITY};
enum { AS_ONE, MESSAGES, BUFFER, CUTS };
enum { AS_GIVEN, OTHERS, NO_FEEDBACK, NUMBERS_COUNT };
enum { COMPRESSED, SOME, SOME_AND_SMALL, ALL, DENSE_COUNT };

static const size_t lengths[CHOICES] = {[TENSORS] = LENGTH(lists),
                                        [GROUP] = LENGTH(groups),
                                        [PROFILE] = 2,
                                        [CUT] = CUTS,
                                        [NUMBERS] = NUMBERS_COUNT,
                                        [FREEZE] = LENGTH(freezes),
                                        [INTERVALS] = LENGTH(intervals),
                                        [BUCKET] = LENGTH(bucket_sizes),
                                        [PARTS] = 2,
                                        [POISON] = LENGTH(poisons),
                                        [DENSE] = DENSE_COUNT,
                                        [ABSENT] = 2,
                                        [GRADIENTS] = 3,
                                        [PARAMETERS] = 3,
                                        [CODEC] = 4,
                                        [THREADS] = 3};

/* Sets the number of messages, their contents and ranks; DeepSpeed's profile has its own. */
static void choose_messages(struct zero_one_case *what, const size_t *choice) {
  onebit_optimizer_options_t *common = &what->options.common;
  const int *group = groups[choice[GROUP]];
  what->size = group[0];
  what->parts = choice[PARTS];
  common->threads = 1 + (int)choice[THREADS];
  if (choice[PROFILE]) {
    common->profile = ONEBIT_PROFILE_DEEPSPEED;
    return;
  }
  what->hosts = group[1];
  common->schedule = group[1] ? ONEBIT_SCHEDULE_HIERARCHICAL : ONEBIT_SCHEDULE_AUTOMATIC;
  common->bucket_size = bucket_sizes[choice[BUCKET]];
  if (choice[CUT] == BUFFER && !group[1])
    common->block_size = ONEBIT_BLOCK_BUFFER;
  if (choice[CUT] == MESSAGES) {
    common->scale = ONEBIT_SCALE_MEAN_ABSOLUTE;
    common->block_size = 64;
    common->chunk_size = 128;
  }
}

/* Movements travel as float32, whatever gradients are. Where a gradient is not finite all ranks
 * skip a step that exchanges; in one that does not, this rank alone stays where it is. */
static void choose_gradients(struct zero_one_case *what, const size_t *choice) {
  onebit_optimizer_options_t *common = &what->options.common;
  common->gradient_dtype = (onebit_dtype_t)choice[GRADIENTS];
  common->parameter_dtype = (onebit_dtype_t)choice[PARAMETERS];
  common->gradient_factor = choice[GRADIENTS] ? 0.25 : 0;
  what->uncompressed = choice[DENSE] != COMPRESSED;
  common->dense_below = choice[DENSE] == SOME_AND_SMALL            ? 32
                        : choice[DENSE] == ALL && !choice[PROFILE] ? 100000
                                                                   : 0;
  what->absent = choice[ABSENT];
  if (!what->absent && what->tensors->count > 0)
    what->poison = poisons[choice[POISON]];
  what->poisoned_rank = what->size - 1;
}

static void choose_numbers(struct zero_one_case *what, const size_t *choice) {
  onebit_zero_one_adam_options_t *options = &what->options;
  options->common.no_error_feedback = choice[NUMBERS] == NO_FEEDBACK;
  options->variance_update_scaler = intervals[choice[INTERVALS]][0];
  options->local_step_scaler = intervals[choice[INTERVALS]][1];
  options->local_step_clipper = intervals[choice[INTERVALS]][2];
  if (choice[NUMBERS] == OTHERS) {
    options->no_bias_correction = 1;
    options->beta1 = 0.8;
    options->beta2 = 0.95;
    options->epsilon = 1e-3;
  }
}

Test(zero_one, in_any_combination) {
  const struct sample sample = sample_combinations("zero_one", 16, lengths, CHOICES);
  for (size_t k = 0; k < sample.count; k++) {
    size_t choice[CHOICES];
    sample_choices(lengths, CHOICES, sample.rows[k], choice);
    struct zero_one_case what = {.steps = 40,
                                 .options = zero_one_options(freezes[choice[FREEZE]]),
                                 .tensors = lists[choice[TENSORS]],
                                 .still = true};
    choose_messages(&what, choice);
    choose_gradients(&what, choice);
    choose_numbers(&what, choice);
    use_codec(test_codecs[choice[CODEC]]);
    check_case_of_zero_one(&what);
  }
  free(sample.rows);
}
