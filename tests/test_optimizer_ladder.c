/* Tests optimizers whose buckets change their width, the bits per element. They must equal the
 * oracle at each width and across every change of it. A bucket for which one bit is not enough
 * raises its width and lowers it again, equally on all ranks. A checkpoint restores the widths,
 * also on another number of ranks. */

#include "optimizers/checkpoint/checkpoint.h"
#include "tests/support_adam.h"
#include "tests/support_checkpoint.h"
#include "tests/support_collectives.h"
#include "tests/support_statistics.h"

/* --- The oracle --------------------------------------------------------------------------------*/

static const int moving[] = {1, 1, 8, 1, 2, 2, 4, 8, 2, 4, 1, 8, 4, 2, 1, 1};

static struct adam_case ladder_case(const struct optimizer_kind *kind, int size) {
  struct adam_case what = {.kind = kind,
                           .size = size,
                           .steps = sizeof moving / sizeof moving[0],
                           .options = ONEBIT_ADAM_OPTIONS_INIT,
                           .tensors = &adam_tensors_odd,
                           .widths = moving,
                           .still = true};
  what.options.beta1 = 0.5;
  what.options.no_bias_correction = 1;
  what.options.freeze_step = kind == &kind_efficient_adam ? 0 : 3;
  what.options.common.max_bits = 8;
  return what;
}

Test(optimizer_ladder, efficient_adam_equals_the_oracle) {
  struct adam_case what = ladder_case(&kind_efficient_adam, 3);
  adam_check(&what);
  what.size = 1;
  adam_check(&what);
  what.options.common.bucket_size = 1000;
  what.options.common.block_size = 64;
  what.options.common.chunk_size = 128;
  what.form = SHUFFLED;
  what.size = 4;
  what.poison = INFINITY;
  what.poisoned_from = 5;
  adam_check(&what);
}

Test(optimizer_ladder, adam_equals_the_oracle) {
  for (int k = 0; k < 4; k++) {
    struct adam_case what = ladder_case(NULL, 2 + k % 2);
    what.options.exchange = k % 2 ? ONEBIT_ADAM_EXCHANGE_STEP : ONEBIT_ADAM_EXCHANGE_MOMENTUM;
    what.options.common.bucket_size = k > 1 ? 1000 : 0;
    what.options.common.clip_norm = k == 2 ? 3 : 0;
    what.options.common.initial_loss_scale = k == 2 ? 256 : 0;
    adam_check(&what);
  }
}

Test(optimizer_ladder, lamb_equals_the_oracle) {
  onebit_lamb_options_t more = ONEBIT_LAMB_OPTIONS_INIT;
  struct adam_case what = ladder_case(&kind_lamb, 3);
  what.more = &more;
  adam_check(&what);
}

Test(optimizer_ladder, on_hosts) {
  struct adam_case what = ladder_case(&kind_efficient_adam, 4);
  what.hosts = 2;
  what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  adam_check(&what);
}

Test(optimizer_ladder, every_codec) { adam_check_codecs(ladder_case(&kind_efficient_adam, 2)); }

/* --- Climbing ----------------------------------------------------------------------------------*/

enum { COUNT = LADDER_COUNT, ALL = 2 * COUNT, STEPS = LADDER_CALLS };

/* Two tensors, each in a bucket of its own. One bit per element becomes too little for the first,
 * but never for the second. */
struct learner {
  const struct ob_method *method;
  onebit_optimizer_t optimizer;
  float *parameters, *gradients;
  int rank;
};

static const struct ob_method *methods[] = {&ob_method_efficient_adam, &ob_method_adam,
                                            &ob_method_lamb,           &ob_method_zero_one_adam,
                                            &ob_method_momentum,       &ob_method_lion};
enum { METHODS = sizeof methods / sizeof methods[0] };

static struct learner make_learner(onebit_comm_t comm, const struct ob_method *method,
                                   int max_bits) {
  struct any_options options = any_options_of(method, NULL);
  struct learner learner = {.method = method,
                            .parameters = allocate(ALL, sizeof(float)),
                            .gradients = allocate(ALL, sizeof(float)),
                            .rank = onebit_comm_rank(comm)};
  onebit_tensor_t tensors[2] = {{learner.parameters, learner.gradients, COUNT, 0, 0, 0}};
  tensors[1] = tensors[0];
  tensors[1].parameter = learner.parameters + COUNT;
  tensors[1].gradient = learner.gradients + COUNT;
  any_count(&options, "freeze_step", 2);
  any_count(&options, "warmup_steps",
            method == &ob_method_efficient_adam ? ONEBIT_WARMUP_NONE
            : method == &ob_method_momentum     ? 2
                                                : 0);
  any_count(&options, "variance_freeze_step", STEPS); /* before this step 0/1 Adam sends
                                                       * gradients */
  any_count(&options, "variance_update_scaler", 1);
  if (method == &ob_method_efficient_adam) /* makes the variance grow slowly */
    any_set(&options, "beta2", 0.9999);
  any_common(&options)->bucket_size = COUNT;
  any_common(&options)->max_bits = max_bits;
  CHECK_STATUS(any_create(&options, comm, tensors, 2, &learner.optimizer), ONEBIT_OK);
  return learner;
}

static void destroy_learner(struct learner *learner) {
  onebit_optimizer_destroy(learner->optimizer);
  free(learner->parameters);
  free(learner->gradients);
}

/* Fills in the gradients. If a method normalises them, a large gradient needs more bits only while
 * it grows. */
static void fill_gradients(struct learner *learner, int step) {
  const bool hard = step >= LADDER_ORDINARY && step < LADDER_HARD;
  ladder_fill(learner->gradients, COUNT, learner->rank, step);
  ladder_fill(learner->gradients + COUNT, COUNT, learner->rank, 0);
  for (size_t i = 7; learner->method->moments && hard && i < COUNT; i += 2048)
    learner->gradients[i] = powf(1.3f, (float)(step - LADDER_ORDINARY));
}

/* Makes a step. Every seventh step is first tried with a gradient that is not finite. */
static void make_step(struct learner *learner, int step) {
  fill_gradients(learner, step);
  const float kept = learner->gradients[9];
  const int sends = step % 7 == 6;
  if (sends && learner->rank == 0)
    learner->gradients[9] = NAN;
  if (sends)
    CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 1e-3f), ONEBIT_SKIPPED);
  learner->gradients[9] = kept;
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 1e-3f), ONEBIT_OK);
}

static int current_bits(const struct learner *learner) {
  return (int)ob_plan_geometry(learner->optimizer->buckets[0].bits)->width;
}

static void check_statistics(const struct learner *learner) {
  const onebit_tensor_statistics_t hard = tensor_statistics(learner->optimizer, 0),
                                   other = tensor_statistics(learner->optimizer, 1);
  char text[512], wanted[64];
  const onebit_optimizer_info_t info = optimizer_info(learner->optimizer);
  CHECK(info.bits == (hard.bits + other.bits) / 2.0 && info.moves == hard.moves + other.moves,
        "%g bits, %d moves", info.bits, (int)info.moves);
  CHECK(other.bits == 1 && other.moves == 0, "the other tensor has %d bits", other.bits);
  CHECK_STATUS(
      onebit_optimizer_describe(learner->optimizer, ONEBIT_FORMAT_TEXT, text, sizeof text, NULL),
      ONEBIT_OK);
  snprintf(wanted, sizeof wanted, "; %.3g bits per element, changed %d times;", info.bits,
           (int)info.moves);
  CHECK(strstr(text, wanted), "%s", text);
}

/* Checks the bits of the first tensor. All ranks must have the same bits, because messages of
 * another width are refused. */
static void climb_and_descend(onebit_comm_t comm, void *context) {
  struct learner learner = make_learner(comm, *(const struct ob_method **)context, 8);
  int peak = 1;
  check_case("%s", learner.method->name);
  for (int step = 0; step < STEPS; step++) {
    make_step(&learner, step);
    const int bits = current_bits(&learner);
    CHECK(step >= LADDER_ORDINARY || bits == 1, "step %d: %d bits", step, bits);
    peak = bits > peak ? bits : peak;
  }
  const int bits = current_bits(&learner);
  const int least =
      learner.method == &ob_method_efficient_adam ? 2 : 4; /* enough for the first tensor */
  CHECK(peak >= least && (least == 2 || bits < peak), "up to %d bits, then %d", peak, bits);
  check_statistics(&learner);
  CHECK_STATUS(onebit_optimizer_compare(learner.optimizer), ONEBIT_OK);
  destroy_learner(&learner);
}

Test(optimizer_ladder, climbs_and_descends) {
  for (size_t m = 0; m < METHODS; m++)
    if (test_wanted(m))
      on_ranks(2, climb_and_descend, &methods[m]);
}

/* --- Checkpoints -------------------------------------------------------------------------------*/

static struct saved_parts parts;

static void save_part(const struct learner *learner, onebit_comm_t comm) {
  struct trainee trainee = {.rank = learner->rank, .optimizer = learner->optimizer};
  trainee_save(&trainee, comm, &parts);
}

static onebit_status_t load_parts(const struct learner *learner) {
  return onebit_optimizer_load(learner->optimizer, (const void *const *)parts.memory, parts.bytes,
                               parts.count);
}

static void free_saved_part(const struct learner *learner, onebit_comm_t comm) {
  synchronize_ranks(comm);
  free(parts.memory[learner->rank]);
}

/* Saves after several steps, and resumes from each of them. One is the first step after a change of
 * the bits. */
static void resume_on_rank(onebit_comm_t comm, void *context) {
  struct learner learner = make_learner(comm, *(const struct ob_method **)context, 8);
  uint64_t moves = 0;
  check_case("%s", learner.method->name);
  for (int step = 0, saved = 0; step < LADDER_HARD + 40 && saved < 5; step++) {
    make_step(&learner, step);
    if (step % 50 != 30 && tensor_statistics(learner.optimizer, 0).moves == moves)
      continue;
    moves = tensor_statistics(learner.optimizer, 0).moves;
    saved++;
    save_part(&learner, comm);
    struct learner other = make_learner(comm, learner.method, 8);
    CHECK_STATUS(load_parts(&other), ONEBIT_OK);
    memcpy(other.parameters, learner.parameters, ALL * sizeof(float));
    for (int k = 0; k < 18; k++) {
      make_step(&learner, ++step);
      make_step(&other, step);
      CHECK_BITS("parameters", other.parameters, learner.parameters, ALL, ONEBIT_FLOAT32);
      CHECK(tensor_statistics(other.optimizer, 0).bits ==
                tensor_statistics(learner.optimizer, 0).bits,
            "step %d", step);
    }
    destroy_learner(&other);
    free_saved_part(&learner, comm);
  }
  CHECK(moves > 0, "it did not climb");
  destroy_learner(&learner);
}

Test(optimizer_ladder, goes_on_from_a_checkpoint) {
  for (size_t m = 0; m < METHODS; m++)
    if (test_wanted(m))
      on_ranks(2, resume_on_rank, &methods[m]);
}

/* From this step on 1-bit Adam sends more than one bit. */
enum { CLIMBED = LADDER_HARD - 10 };

static void climb_and_save(onebit_comm_t comm, void *context) {
  int *bits = context;
  struct learner learner = make_learner(comm, &ob_method_adam, 8);
  for (int step = 0; step < CLIMBED; step++)
    make_step(&learner, step);
  *bits = tensor_statistics(learner.optimizer, 0).bits;
  save_part(&learner, comm);
  destroy_learner(&learner);
}

/* A load on other ranks with at most max_bits. The bits after it must be the saved ones, or
 * max_bits if that is less. */
struct elsewhere {
  int bits, max_bits;
};

static void load_on_other_ranks(onebit_comm_t comm, void *context) {
  const struct elsewhere *elsewhere = context;
  const int bits = elsewhere->bits, max = elsewhere->max_bits ? elsewhere->max_bits : 1;
  struct learner learner = make_learner(comm, &ob_method_adam, elsewhere->max_bits);
  CHECK_STATUS(load_parts(&learner), ONEBIT_OK);
  CHECK(tensor_statistics(learner.optimizer, 0).bits == (bits < max ? bits : max),
        "%d bits, it had %d", tensor_statistics(learner.optimizer, 0).bits, bits);
  memset(learner.parameters, 0, ALL * sizeof(float)); /* the caller must keep the parameters; these
                                                       * are other ones */
  for (int step = CLIMBED; step < CLIMBED + 40; step++)
    make_step(&learner, step);
  CHECK_STATUS(onebit_optimizer_compare(learner.optimizer), ONEBIT_OK);
  destroy_learner(&learner);
}

static void refuse_newer(onebit_comm_t comm, void *context) {
  struct learner learner = make_learner(comm, &ob_method_adam, 8);
  (void)context;
  CHECK_STATUS(load_parts(&learner), ONEBIT_ERROR_CHECKPOINT);
  CHECK_WORDS("it has format version 3, but this library reads versions up to 2");
  destroy_learner(&learner);
}

static struct ob_part_header *part_header(int rank) {
  return (struct ob_part_header *)parts.memory[rank];
}

Test(optimizer_ladder, other_ranks_and_other_options) {
  struct elsewhere elsewhere = {.max_bits = 8};
  on_ranks(2, climb_and_save, &elsewhere.bits);
  cr_assert(elsewhere.bits > 1 && part_header(0)->version == 2, "%d bits, version %d",
            elsewhere.bits, (int)part_header(0)->version);
  on_ranks(3, load_on_other_ranks, &elsewhere);
  on_ranks(1, load_on_other_ranks, &elsewhere);
  elsewhere.max_bits = 2;
  on_ranks(2, load_on_other_ranks, &elsewhere);
  elsewhere.max_bits = 0;
  on_ranks(2, load_on_other_ranks, &elsewhere);
  part_header(0)->version = part_header(1)->version = 3;
  on_ranks(2, refuse_newer, NULL);
  free(parts.memory[0]);
  free(parts.memory[1]);
}

/* Saves a checkpoint of format version 1, which has no widths. After loading it, buckets begin with
 * the fewest bits. */
static void save_without_widths(onebit_comm_t comm, void *context) {
  struct learner learner = make_learner(comm, &ob_method_adam, 0);
  (void)context;
  for (int step = 0; step < CLIMBED; step++)
    make_step(&learner, step);
  save_part(&learner, comm);
  destroy_learner(&learner);
}

Test(optimizer_ladder, checkpoints_without_widths) {
  struct elsewhere elsewhere = {.bits = 1, .max_bits = 8};
  on_ranks(2, save_without_widths, NULL);
  cr_assert(part_header(0)->version == 1, "version %d", (int)part_header(0)->version);
  on_ranks(2, load_on_other_ranks, &elsewhere);
  on_ranks(3, load_on_other_ranks, &elsewhere);
  free(parts.memory[0]);
  free(parts.memory[1]);
}

/* --- A move ------------------------------------------------------------------------------------*/

/* Moves an optimizer to a communicator of the same ranks. */
static void move_on_rank(onebit_comm_t comm, void *context) {
  struct learner learner = make_learner(comm, &ob_method_momentum, 8);
  (void)context;
  for (int step = 0; step < CLIMBED; step++)
    make_step(&learner, step);
  const onebit_tensor_statistics_t before = tensor_statistics(learner.optimizer, 0);
  CHECK(before.bits > 1, "%d bits", before.bits);
  CHECK_STATUS(onebit_optimizer_move(learner.optimizer, comm), ONEBIT_OK);
  CHECK(tensor_statistics(learner.optimizer, 0).bits == before.bits &&
            tensor_statistics(learner.optimizer, 0).moves == before.moves,
        "%d bits, before %d", tensor_statistics(learner.optimizer, 0).bits, before.bits);
  for (int step = CLIMBED; step < CLIMBED + 20; step++)
    make_step(&learner, step);
  CHECK_STATUS(onebit_optimizer_compare(learner.optimizer), ONEBIT_OK);
  destroy_learner(&learner);
}

Test(optimizer_ladder, a_move_keeps_them) { on_ranks(2, move_on_rank, NULL); }
