/* Checkpoints of outer steps that are damaged, or of something else: refused, nothing changes. */
#include "tests/support_outer.h"

static void refuse(struct outer_trained *it, const struct saved_parts *saved, const char *message) {
  struct saved_parts now = {0};
  CHECK_STATUS(outer_load(it, saved), ONEBIT_ERROR_CHECKPOINT);
  CHECK_WORDS(message);
  outer_save_part(it, &now);
  CHECK(part_number(now.memory[0], PART_STEPS) == 0, "a refused part has changed something");
  free(now.memory[0]);
}

/* A part of one rank, in the middle of an exchange. */
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
    refuse(it, &parts, "part 0: ");
    part[at] ^= (unsigned char)(1 << at % 8);
  }
  for (size_t left = 0; left < bytes; left += left < 300 ? 37 : 1999) {
    parts.bytes[0] = left;
    refuse(it, &parts, "truncated");
  }
  parts.bytes[0] = bytes;
  part[PART_VERSION] = 9;
  refuse(it, &parts, "written by format version 9, this library reads up to 2");
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

/* With the right checksums. */
Test(outer_checkpoint_wrong, numbers_of_no_state_are_refused) {
  const onebit_outer_options_t options = small_options();
  static const struct {
    size_t place;
    uint64_t number;
    const char *message;
  } rows[] = {{1, 4, "step 4 of a round of 4 steps"},
              {2, 0, "of a round of 0 steps"},
              {3, 5, "fragment 0 has 598 elements, saved were 5"},
              {4, 3, "no possible state"},
              {5, UINT64_MAX, "no possible state"},
              {6, 2, "no possible state"},
              {7, UINT64_MAX, "no possible state"},
              {8, (uint64_t)1 << 63 | 1, "no possible state"},
              {9, UINT64_MAX, "no possible state"}};
  onebit_comm_t comm = self_comm();
  struct saved_parts parts = small_part(comm, &options);
  struct outer_trained *it = outer_begin(comm, &options);
  for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
    const struct section numbers = part_section(parts.memory[0], 0);
    const uint64_t sound = part_number(parts.memory[0], (size_t)numbers.offset + 8 * rows[k].place);
    check_case("number %zu", rows[k].place);
    set_number(&parts, rows[k].place, rows[k].number);
    refuse(it, &parts, rows[k].message);
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
    refuse(it, &parts, message);                                                                   \
    onebit_outer_destroy(it->outer);                                                               \
    options = small_options();                                                                     \
  } while (0)
  options.rule = ONEBIT_OUTER_MEAN;
  REFUSE("saved with outer momentum, loaded without it");
  options.weighted = 1;
  REFUSE("saved without weights, loaded with them");
  options.fragments = 2;
  REFUSE("saved with 1 fragments, loaded with 2");
  CHECK_STATUS(onebit_outer_create(comm, &tensor, 1, &options, &outer), ONEBIT_OK);
  it->outer = outer;
  refuse(it, &parts, "4 tensors were saved, there are 1");
  onebit_outer_destroy(outer);
  struct saved_parts twice = {.count = 2,
                              .memory = {parts.memory[0], parts.memory[0]},
                              .bytes = {parts.bytes[0], parts.bytes[0]}};
  outer_create(it, comm, &options);
  refuse(it, &twice, "saved by one of 1 ranks, and there are 2 parts");
  memcpy((char *)parts.memory[0] + PART_KIND, "adam\0", 6);
  part_sign(parts.memory[0]);
  refuse(it, &parts, "of another kind: saved by adam, loaded by outer");
  outer_end(it);
  free_parts(&parts);
  onebit_comm_destroy(comm);
}
