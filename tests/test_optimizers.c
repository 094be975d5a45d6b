/*
 * Tests that every optimizer equals its oracle in every bit of every parameter after every step,
 * for all tensors, options, buckets, hosts, codecs, threads and types, including skipped steps.
 * test_zero_one.c tests 0/1 Adam, whose ranks differ between steps. Features that only one
 * optimizer has are tested in the optimizer's own file.
 */
#include "tests/support_adam.h"

#define OF(optimizer, ...)                                                                         \
  {                                                                                                \
    .kind = &kind_##optimizer, .size = 3, .steps = 12, .tensors = &adam_tensors_odd,               \
    .still = true, .options = {                                                                    \
      .size = sizeof(onebit_adam_options_t),                                                       \
      __VA_ARGS__                                                                                  \
    }                                                                                              \
  }
#define DEEPSPEED .common.profile = ONEBIT_PROFILE_DEEPSPEED

static const struct adam_case kinds[] = {
    OF(adam, .freeze_step = 5),
    OF(adam, .freeze_step = 5, DEEPSPEED),
    OF(adam, .freeze_step = 4, .exchange = ONEBIT_ADAM_EXCHANGE_STEP),
    OF(adam, .freeze_step = 5, .exchange = ONEBIT_ADAM_EXCHANGE_STEP, DEEPSPEED),
    OF(adam, .freeze_step = 4, .shards = ONEBIT_SHARDS_STEP),
    OF(adam, .freeze_step = 4, .shards = ONEBIT_SHARDS_PARAMETERS),
    OF(lamb, .freeze_step = 5),
    OF(lamb, .freeze_step = 5, DEEPSPEED),
    OF(efficient_adam, .freeze_step = 0),
    OF(efficient_adam, .freeze_step = 5, .beta2 = 0.95),
    OF(efficient_lamb, .freeze_step = 0),
    OF(momentum, .freeze_step = 0),
    OF(momentum, .freeze_step = 4),
    OF(lion, .freeze_step = 0),
};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

static bool is_deepspeed(const struct adam_case *what) {
  return what->options.common.profile == ONEBIT_PROFILE_DEEPSPEED;
}

/* --- All options combined */

/* A test case has a choice for each of these. Every pair of choices occurs in some case. */
enum {
  KIND,
  TENSORS,
  FORM,
  BUCKET,
  GROUP,
  GRADIENTS,
  PARAMETERS,
  CUT,
  CLIP,
  WEIGHT,
  POISON,
  DENSE,
  ABSENT,
  NUMBERS,
  WARM_UP,
  CODEC,
  THREADS,
  CHOICES
};

/* The fourth tensor's only element never has a gradient. */
static const struct adam_tensors with_a_still_one = {
    6, {{2, 0.1f, 0}, {0, 0, 0}, {3, 0, 2.0f}, {1, 0, 0}, {2100, 0, 0}, {777, 0.01f, 0.5f}}};
/* Tensors that find the most errors are listed several times. */
static const struct adam_tensors *const lists[] = {
    &adam_tensors_odd,        &adam_tensors_odd,  &adam_tensors_odd,
    &adam_tensors_odd,        &adam_tensors_one,  &adam_tensors_tiny,
    &adam_tensors_many_words, &adam_tensors_none, &with_a_still_one};
static const size_t bucket_sizes[] = {0, 1, 1000, 5200};
/* Numbers of ranks and hosts. 0 hosts means that the schedule is that of one host. */
static const int groups[][2] = {{1, 0}, {2, 0}, {3, 0}, {4, 0}, {7, 0},
                                {4, 1}, {4, 2}, {6, 2}, {6, 3}, {4, 4}};
/* The norm 195 clips some of the steps. No norm causes a skip by itself. */
static const double clip_norms[] = {0, 1e-3, 195};
static const float poisons[] = {0, INFINITY, NAN};
/* Tensors that stay uncompressed: none; 0, 1, 3 and 5; 1 and 8; or all. */
static const unsigned masks[] = {0, 0x2b, 0x102, 0x1ff};
static const size_t absent[] = {0, 5, 2, 1};
enum { AS_ONE, MESSAGES, BUFFER, CUTS };
enum { AS_GIVEN, OTHERS, NO_FEEDBACK, NUMBERS_COUNT };
enum { ONE_STEP, NEVER, AUTOMATIC, OWN, WARM_UPS = OWN + 4 };

static const size_t lengths[CHOICES] = {[KIND] = KINDS,
                                        [TENSORS] = LENGTH(lists),
                                        [FORM] = ADAM_FORMS,
                                        [GROUP] = LENGTH(groups),
                                        [BUCKET] = LENGTH(bucket_sizes),
                                        [GRADIENTS] = 3,
                                        [PARAMETERS] = 3,
                                        [CUT] = CUTS,
                                        [CLIP] = LENGTH(clip_norms),
                                        [WEIGHT] = 2,
                                        [POISON] = LENGTH(poisons),
                                        [DENSE] = LENGTH(masks) + 1,
                                        [ABSENT] = LENGTH(absent),
                                        [NUMBERS] = NUMBERS_COUNT,
                                        [WARM_UP] = WARM_UPS,
                                        [CODEC] = 4,
                                        [THREADS] = 3};

/* True if the servers of this optimizer may be replicated. */
static bool is_replicable(const struct adam_case *what) {
  return what->kind != &kind_lion && !is_deepspeed(what) && !what->options.shards;
}

/* Sets the ranks, the number of messages and their contents. Profile deepspeed has its own
 * values. */
static void choose_messages(struct adam_case *what, const size_t *choice) {
  onebit_optimizer_options_t *common = &what->options.common;
  const int *group = groups[choice[GROUP]];
  const bool hosts = group[1] && !is_deepspeed(what) && !what->options.shards;
  what->size = group[0];
  what->form = (enum adam_form)choice[FORM];
  common->threads = 1 + (int)choice[THREADS];
  if (hosts) {
    what->hosts = group[1];
    common->schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  }
  if (is_deepspeed(what)) {
    common->chunk_size = choice[CUT] == MESSAGES ? 2048 : 0;
    return;
  }
  common->bucket_size = bucket_sizes[choice[BUCKET]];
  if (choice[CUT] == BUFFER && !hosts)
    common->block_size = ONEBIT_BLOCK_BUFFER;
  if (choice[CUT] != BUFFER && !hosts && choice[THREADS] == 1 && is_replicable(what))
    common->schedule = ONEBIT_SCHEDULE_ALLGATHER;
  if (choice[CUT] == MESSAGES) {
    common->scale = ONEBIT_SCALE_MEAN_ABSOLUTE;
    common->block_size = 64;
    common->chunk_size = 128;
  }
}

/* Sets gradients of any type. They may be weighted and clipped, may be in another array in each
 * step, and may be missing. */
static void choose_gradients(struct adam_case *what, const size_t *choice) {
  onebit_optimizer_options_t *common = &what->options.common;
  common->gradient_dtype = (onebit_dtype_t)choice[GRADIENTS];
  common->parameter_dtype = (onebit_dtype_t)choice[PARAMETERS];
  if (what->options.shards == ONEBIT_SHARDS_STEP) /* this mode allows no other type */
    common->parameter_dtype = ONEBIT_FLOAT32;
  common->clip_norm = clip_norms[choice[CLIP]];
  if (choice[WEIGHT]) {
    common->gradient_factor = 1.0 / 3;
    common->initial_loss_scale = 4;
    common->loss_scale_interval = 5;
    what->multiple = 3.0f;
  }
  if (choice[DENSE] < LENGTH(masks))
    what->uncompressed = masks[choice[DENSE]];
  else
    common->dense_below = 101;
  /* For DeepSpeed's LAMB, the oracle has the right order of squares only if all tensors are
   * compressed. */
  if (is_deepspeed(what) && what->kind == &kind_lamb && choice[DENSE])
    common->clip_norm = 0;
  what->absent = absent[choice[ABSENT]];
  what->moving = what->absent > 0;
  if (what->tensors->count == 0 || what->absent) /* a wrong value in a missing gradient would not be
                                                  * noticed */
    return;
  what->poison = poisons[choice[POISON]];
  what->poisoned_rank = what->size - 1;
  what->poisoned_from = choice[FORM] % 2 ? 6 : 0;
}

/* Sets other options. With beta2 = 7/8 the ninth step is the first that can freeze the variance. */
static void choose_numbers(struct adam_case *what, const size_t *choice) {
  what->options.common.no_error_feedback = choice[NUMBERS] == NO_FEEDBACK;
  if (choice[NUMBERS] == OTHERS) {
    what->options.beta1 = 0.8;
    what->options.beta2 = 0.95;
    what->options.epsilon = 1e-3;
    what->options.no_bias_correction = 1;
  }
  if (what->options.freeze_step == 0)
    return;
  if (choice[WARM_UP] == ONE_STEP)
    what->options.freeze_step = 1;
  if (choice[WARM_UP] == NEVER)
    what->options.freeze_step = ONEBIT_FREEZE_NEVER;
  if (choice[WARM_UP] == AUTOMATIC && what->tensors->count > 0 && what->absent != 1 &&
      (what->kind == &kind_adam || what->kind == &kind_lamb)) {
    what->options.freeze_step = ONEBIT_FREEZE_AUTOMATIC;
    what->options.beta2 = 0.875;
    what->steps = 20;
  }
}

Test(optimizers, in_any_combination) {
  const struct sample sample = sample_combinations("optimizers", 8, lengths, CHOICES);
  for (size_t k = 0; k < sample.count; k++) {
    size_t choice[CHOICES];
    sample_choices(lengths, CHOICES, sample.rows[k], choice);
    struct adam_case what = kinds[choice[KIND]];
    what.tensors = lists[choice[TENSORS]];
    choose_messages(&what, choice);
    choose_gradients(&what, choice);
    choose_numbers(&what, choice);
    use_codec(test_codecs[choice[CODEC]]);
    adam_check(&what);
  }
  free(sample.rows);
}

/* --- Cases that the tables above leave out */

Test(optimizers, counts_on_the_edges) {
  for (size_t k = 0; k < KINDS; k++)
    for (size_t c = 0; c < test_counts_count; c++) {
      const struct adam_tensors tensors = {1, {{test_counts[c], 0.01f, 0}}};
      struct adam_case what = kinds[k];
      what.tensors = &tensors;
      if (test_counts[c] < 10000 && test_wanted_of(k, c))
        adam_check(&what);
    }
}

Test(optimizers, options_of_their_own) {
  static const onebit_efficient_adam_options_t gain = {.gain = 1.7};
  static const onebit_efficient_adam_options_t ratios = {.min_ratio = 0.5, .max_ratio = 0.6};
  static const onebit_lion_options_t betas = {.beta3 = 0.97};
  static const onebit_lamb_options_t limits = {.max_coefficient = 0.3,
                                               .min_coefficient = 0.2,
                                               .coefficient_beta = 0.7,
                                               .max_factor = 1.05,
                                               .min_factor = 0.93,
                                               .factor_change = 0.02};
  struct adam_case cases[] = {OF(efficient_adam, .freeze_step = 0),
                              OF(efficient_lamb, .freeze_step = 0), OF(lion, .freeze_step = 0),
                              OF(lamb, .freeze_step = 5)};
  const void *more[] = {&gain, &ratios, &betas, &limits};
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
    cases[k].more = more[k];
    adam_check_on_groups(cases[k]);
  }
}

/* Some elements get their first gradient only in a late step. One tensor has no gradient at all
 * until then. */
Test(optimizers, first_gradients_that_come_late) {
  for (size_t k = 0; k < KINDS; k++) {
    struct adam_case what = kinds[k];
    what.late = 9;
    adam_check(&what);
    what.tensors = &adam_tensors_tiny;
    adam_check(&what);
  }
}

/* Each rank has the wrong value once, in all steps from the first on or only after the warm-up. The
 * square of the last value is not finite, which only Adam notices in a warm-up. */
Test(optimizers, skipped_steps_change_nothing) {
  static const float values[] = {INFINITY, NAN, -3e38f, 1e22f};
  for (size_t k = 0; k < KINDS; k++)
    for (int rank = 0; rank < (kinds[k].kind == &kind_adam ? 4 : 3); rank++)
      for (int from = 0; from <= 6; from += 6) {
        struct adam_case what = kinds[k];
        what.size = 1 + rank + (int)k % 2;
        what.poison = values[rank];
        what.poisoned_rank = rank;
        what.poisoned_from = from;
        what.options.common.bucket_size = rank == 1 && !is_deepspeed(&what) ? 1000 : 0;
        what.uncompressed = rank == 2 ? 1u << 5 : 0;
        what.form = rank == 2 ? BACKWARD : IN_ONE_CALL;
        adam_check(&what);
      }
}

/* The wrong value is on another rank, and in another bucket, each time. 1e30 and its host's mean
 * are finite, but their squares are not. Only the rank that compresses that part of the mean
 * notices it. */
Test(optimizers, skipped_steps_change_nothing_on_hosts) {
  static const float values[] = {INFINITY, 1e30f, -3e38f};
  static const size_t sizes[] = {0, 1, 1000};
  for (int rank = 0; rank < 6; rank++)
    for (size_t k = 0; k < 3; k++) {
      struct adam_case what = OF(adam, .freeze_step = 4, .common.chunk_size = 2048,
                                 .common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL);
      what.options.common.bucket_size = sizes[(k + (size_t)rank) % 3];
      what.form = (enum adam_form)((rank + (int)k) % ADAM_FORMS);
      what.poison = values[k];
      what.poisoned_rank = rank;
      /* before the freeze only the variance squares values, so 1e30 is harmless */
      what.poisoned_from = k == 1 ? 4 : 0;
      what.size = 6;
      what.hosts = 2 + rank % 2;
      adam_check(&what);
    }
}

/* With clipping, one copy of the residuals is enough, because nothing has been compressed when a
 * step is skipped. */
Test(optimizers, skipped_steps_change_nothing_with_one_copy) {
  for (size_t k = 0; k < KINDS; k++)
    for (int size = 1; size <= 4; size++) {
      struct adam_case what = kinds[k];
      if (what.kind == &kind_lamb || what.options.shards || is_deepspeed(&what))
        continue;
      what.size = size;
      what.options.common.clip_norm = 10;
      what.options.common.residual_copies = 1;
      what.poison = size % 2 ? NAN : -INFINITY;
      what.poisoned_rank = size / 2;
      adam_check(&what);
    }
}

/* A tensor with exactly dense_below elements is compressed. */
Test(optimizers, dense_below_is_below) {
  for (size_t k = 0; k < KINDS; k++) {
    struct adam_case what = kinds[k];
    what.options.common.dense_below = 100;
    adam_check(&what);
  }
}

static struct adam_case efficient_on_three_ranks(void) {
  return (struct adam_case){.kind = &kind_efficient_adam,
                            .size = 3,
                            .steps = 16,
                            .options = ONEBIT_ADAM_OPTIONS_INIT,
                            .tensors = &adam_tensors_odd,
                            .still = true};
}

/* Tests tensors that are tables. Some buckets also contain a tensor that is no table. */
Test(optimizers, tables) {
  struct adam_case what = efficient_on_three_ranks();
  what.tables = 1u << 2 | 1u << 5;
  what.uncompressed = 1u << 3;
  what.poison = NAN;
  adam_check(&what);
  what.options.common.bits = 2; /* makes products with levels exact: */
  what.options.beta1 = 0.5;
  what.options.common.bucket_size = 1000;
  adam_check(&what);
  what = efficient_on_three_ranks();
  what.kind = &kind_efficient_lamb;
  what.tables = ~0u;
  what.options.freeze_step = 5;
  what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  what.options.common.gradient_dtype = ONEBIT_FLOAT16;
  what.size = 4;
  what.hosts = 2;
  adam_check(&what);
}
