/*
 * Tests loading wrong parts. Every rank must get an error whose message names the part and its
 * fault, and nothing may have changed.
 */
#include "tests/support_checkpoint.h"

struct mistake_run {
  const struct checkpoint_case *what;
  struct saved_parts parts;
  onebit_status_t wanted;
  const char *words;
};

static void check_failed_load(onebit_comm_t comm, void *context) {
  struct mistake_run *run = context;
  struct trainee trainee = trainee_create(comm, run->what, 3);
  size_t bytes, again;
  check_case("%s", run->words);
  void *before = optimizer_part(trainee.optimizer, &bytes);
  CHECK_STATUS(trainee_load(&trainee, &run->parts), run->wanted);
  CHECK_WORDS(run->words);
  void *after = optimizer_part(trainee.optimizer, &again);
  CHECK(again == bytes && memcmp(before, after, bytes) == 0, "it has changed");
  trainee_step(&trainee, 0);
  free(before);
  free(after);
  trainee_destroy(&trainee);
}

static struct mistake_run save_mistake(const struct checkpoint_case *what, int steps,
                                       const char *words) {
  struct mistake_run run = {.what = what, .wanted = ONEBIT_ERROR_CHECKPOINT, .words = words};
  save_after(what, steps, &run.parts);
  return run;
}

static void check_mistake(struct mistake_run *run, const struct checkpoint_case *what) {
  run->what = what;
  on_hosts(what->size, what->hosts ? what->hosts : 1, check_failed_load, run);
  free_parts(&run->parts);
}

#define ADAM      .method = &ob_method_adam
#define EFFICIENT .method = &ob_method_efficient_adam
#define MOMENTUM  .method = &ob_method_momentum
static const struct {
  const char *words;
  int steps; /* steps of the optimizer that saves; the other one loads */
  struct checkpoint_case saved, loaded;
} others[] = {
    {"saved by adam, loaded by momentum", 5, {ADAM, .freeze_step = 3}, {MOMENTUM}},
    {"profile",
     5,
     {ADAM, .freeze_step = 3},
     {ADAM, .freeze_step = 3, .common.profile = ONEBIT_PROFILE_DEEPSPEED}},
    {"exchange",
     5,
     {ADAM, .freeze_step = 3},
     {ADAM, .freeze_step = 3, .exchange = ONEBIT_ADAM_EXCHANGE_STEP}},
    {"tensor 1 was compressed",
     5,
     {ADAM, .freeze_step = 3},
     {ADAM, .freeze_step = 3, .uncompressed = 2}},
    {"saved after the freeze with shards=0, but loaded with shards=1",
     5,
     {ADAM, .freeze_step = 3},
     {ADAM, .freeze_step = 3, .shards = ONEBIT_SHARDS_STEP}},
    /* Efficient-Adam's warm-up compresses divided gradients */
    {"tensor 1 was compressed",
     2,
     {EFFICIENT, .freeze_step = 6},
     {EFFICIENT, .freeze_step = 6, .uncompressed = 2}},
    {"it was saved in a warm-up, but is loaded into an optimizer without a warm-up",
     2,
     {MOMENTUM, .freeze_step = 3},
     {MOMENTUM}},
};

Test(checkpoint_wrong, words_for_another_optimizer) {
  for (size_t k = 0; k < sizeof others / sizeof others[0]; k++) {
    struct checkpoint_case saved = others[k].saved, loaded = others[k].loaded;
    saved.name = loaded.name = others[k].words;
    saved.size = loaded.size = 2;
    saved.steps = loaded.steps = 8;
    struct mistake_run run = save_mistake(&saved, others[k].steps, others[k].words);
    check_mistake(&run, &loaded);
  }
}

static void swap_parts(struct saved_parts *parts, int a, int b) {
  void *memory = parts->memory[a];
  size_t bytes = parts->bytes[a];
  parts->memory[a] = parts->memory[b];
  parts->bytes[a] = parts->bytes[b];
  parts->memory[b] = memory;
  parts->bytes[b] = bytes;
}

/* Returns the number of the section of kind `what`. */
static size_t find_section(const void *part, uint32_t what) {
  size_t number = 0;
  while (part_section(part, number).what != what)
    number++;
  return number;
}

static void damage_section(void *part, uint32_t what) {
  struct section section = part_section(part, find_section(part, what));
  ((unsigned char *)part)[section.offset + 5] ^= 4;
}

Test(checkpoint_wrong, words_for_parts) {
  struct mistake_run run = save_mistake(
      &two_ranks, 5, "part 0: it was saved by 2 ranks, but the number of parts given is 1");
  free(run.parts.memory[1]);
  run.parts.count = 1;
  check_mistake(&run, &two_ranks);
  run = save_mistake(&two_ranks, 5, "part 0: it was saved by rank 1");
  swap_parts(&run.parts, 0, 1);
  check_mistake(&run, &two_ranks);
  struct mistake_run later = save_mistake(&two_ranks, 6, "");
  run = save_mistake(&two_ranks, 5, "parts 0 and 1 were saved after different steps, 5 and 6");
  void *one = run.parts.memory[1];
  run.parts.memory[1] = later.parts.memory[1];
  check_mistake(&run, &two_ranks);
  later.parts.memory[1] = one;
  free_parts(&later.parts);
  run = save_mistake(&two_ranks, 5, "part 1: it is truncated: it has 1000 of ");
  run.parts.bytes[1] = 1000;
  check_mistake(&run, &two_ranks);
  run = save_mistake(&two_ranks, 5, "part 1: section 'variance' has the checksum ");
  damage_section(run.parts.memory[1], SECTION_VARIANCE);
  check_mistake(&run, &two_ranks);
  run = save_mistake(&two_ranks, 5,
                     "part 1: it has format version 9, but this library reads versions up to 2");
  ((unsigned char *)run.parts.memory[1])[PART_VERSION] = 9;
  check_mistake(&run, &two_ranks);
  run = save_mistake(&two_ranks, 5, "part 1: its first bytes");
  ((unsigned char *)run.parts.memory[1])[3] ^= 1;
  check_mistake(&run, &two_ranks);
  run = save_mistake(&two_ranks, 5, "part 0: its header has the checksum ");
  ((unsigned char *)run.parts.memory[0])[PART_STEPS] ^= 1;
  check_mistake(&run, &two_ranks);
}

/* Changes a tensor's count in all parts, with correct checksums. */
Test(checkpoint_wrong, words_for_other_tensors) {
  struct mistake_run run = save_mistake(
      &two_ranks, 5, "part 0: tensor 3 has 4097 elements here, and 12 in the checkpoint");
  for (int k = 0; k < 2; k++) {
    part_set(run.parts.memory[k], PART_ROWS + 3 * 16, 12);
    part_sign(run.parts.memory[k]);
  }
  check_mistake(&run, &two_ranks);
}

/* The error message must name an element that no part has. */
Test(checkpoint_wrong, words_for_missing_elements) {
  struct mistake_run run =
      save_mistake(&two_ranks, 5, "no part has element 0 of section 'variance'");
  char *part = run.parts.memory[0];
  size_t number = find_section(part, SECTION_VARIANCE);
  struct section section = part_section(part, number);
  section.first++;
  section.count--;
  if (section.count % 2)
    section.count--; /* shortens the section by 8 bytes, so the next one moves up */
  part_set_section(part, number, &section);
  size_t bytes = run.parts.bytes[0] - 8, next = section.offset + (section.count * 4 + 7) / 8 * 8;
  memmove(part + next, part + next + 8, bytes - next);
  for (size_t k = number + 1; k < part_number(part, PART_SECTIONS); k++) {
    struct section after = part_section(part, k);
    after.offset -= 8;
    part_set_section(part, k, &after);
  }
  part_set(part, PART_BYTES, bytes);
  run.parts.bytes[0] = bytes;
  part_sign_section(part, number);
  part_sign(part);
  check_mistake(&run, &two_ranks);
}

Test(checkpoint_wrong, values_that_are_not_finite) {
  static const uint32_t whats[] = {SECTION_MOMENTUM, SECTION_WORKER, SECTION_SERVER};
  static const char *const words[] = {"section 'momentum': element ",
                                      "section 'worker residuals': element ",
                                      "section 'server residuals': element "};
  for (int k = 0; k < 3; k++) {
    struct checkpoint_case one = two_ranks;
    one.size = 1;
    struct mistake_run run = save_mistake(&one, 5, words[k]);
    char *part = run.parts.memory[0];
    size_t number = find_section(part, whats[k]);
    const float infinite = 1.0f / 0.0f;
    memcpy(part + part_section(part, number).offset, &infinite, sizeof infinite);
    part_sign_section(part, number);
    part_sign(part);
    check_mistake(&run, &one);
  }
}

/* A rank checks only the sections that it needs, not another rank's residual. If one rank finds
 * damage, all ranks get an error. */
static void check_damaged_load(onebit_comm_t comm, void *context) {
  struct mistake_run *run = context;
  struct trainee trainee = trainee_create(comm, run->what, 3);
  bool mine = trainee.rank == 1;
  CHECK_STATUS(trainee_load(&trainee, &run->parts),
               mine ? ONEBIT_ERROR_CHECKPOINT : ONEBIT_ERROR_PEER);
  CHECK_WORDS(mine ? "section 'worker residuals'" : "rank 1 failed with ONEBIT_ERROR_CHECKPOINT");
  trainee_step(&trainee, 0);
  trainee_destroy(&trainee);
}

Test(checkpoint_wrong, one_rank_tells_the_others) {
  struct mistake_run run = save_mistake(&two_ranks, 5, "");
  damage_section(run.parts.memory[1], SECTION_WORKER);
  on_ranks(2, check_damaged_load, &run);
  free_parts(&run.parts);
}

/* Two checkpoints. Each rank loads a different one. */
struct mixed_run {
  struct saved_parts parts[2];
};

static void check_mixed_load(onebit_comm_t comm, void *context) {
  const struct mixed_run *run = context;
  struct trainee trainee = trainee_create(comm, &two_ranks, 3);
  CHECK_STATUS(trainee_load(&trainee, &run->parts[trainee.rank]), ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("the checkpoint (shown as a hash) differs between ranks");
  trainee_step(&trainee, 0);
  trainee_destroy(&trainee);
}

Test(checkpoint_wrong, another_checkpoint_on_each_rank) {
  struct mixed_run run;
  save_after(&two_ranks, 5, &run.parts[0]);
  save_after(&two_ranks, 6, &run.parts[1]);
  on_ranks(2, check_mixed_load, &run);
  free_parts(&run.parts[0]);
  free_parts(&run.parts[1]);
}

/* --- Arguments */

/* If the buffer is too small for a part, nothing is written. support_wrong_calls.h tests other
 * wrong arguments. */
Test(checkpoint_wrong, too_little_room) {
  onebit_comm_t comm = self_comm();
  static unsigned char memory[9000]; /* most of it is for the norms of the automatic freeze */
  float parameter = 0, gradient = 1;
  onebit_tensor_t tensor = {.parameter = &parameter, .gradient = &gradient, .count = 1};
  onebit_optimizer_t optimizer;
  size_t bytes = 7, whole;
  const void *parts[] = {memory, NULL};
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, NULL, &optimizer), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_save(optimizer, NULL, 0, &whole), ONEBIT_OK);
  fill_pattern(memory, sizeof memory);
  CHECK_STATUS(onebit_optimizer_save(optimizer, memory, whole - 1, &bytes), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("capacity is ");
  CHECK(bytes == whole && pattern_holds(memory, sizeof memory), "it has written");
  CHECK_STATUS(onebit_optimizer_save(optimizer, memory, whole, &bytes), ONEBIT_OK);
  const size_t lengths[] = {whole, 0};
  CHECK_STATUS(onebit_optimizer_load(optimizer, parts, lengths, 2), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("parts[1] is NULL");
  CHECK_STATUS(onebit_optimizer_load(optimizer, parts, lengths, 1), ONEBIT_OK);
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
}

/* An optimizer without tensors is saved and loaded like any other. */
Test(checkpoint_wrong, no_tensor) {
  onebit_optimizer_t optimizer;
  unsigned char memory[2000];
  const void *parts[] = {memory};
  size_t bytes;
  onebit_comm_t comm = self_comm();
  CHECK_STATUS(onebit_adam_create(comm, NULL, 0, NULL, &optimizer), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_step(optimizer, 0.1f), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_save(optimizer, memory, sizeof memory, &bytes),
               ONEBIT_ERROR_ARGUMENT);
  unsigned char *whole = allocate(1, bytes);
  parts[0] = whole;
  CHECK_STATUS(onebit_optimizer_save(optimizer, whole, bytes, &bytes), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_load(optimizer, parts, &bytes, 1), ONEBIT_OK);
  free(whole);
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
}
