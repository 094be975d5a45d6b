/*
 * Tests damaged and malicious parts. Every flipped bit and every truncation must be found. Parts
 * with wrong numbers but correct checksums must do no harm. After an error the optimizer must be
 * unchanged.
 */
#include "optimizers/checkpoint/checkpoint.h"
#include "tests/support_checkpoint.h"

/* --- A small optimizer of one rank, whose part is therefore small */

enum { SMALL = 45 };

struct small {
  onebit_comm_t comm;
  float parameters[SMALL], gradients[SMALL];
  onebit_optimizer_t optimizer;
};

static void small_step(struct small *small, int step) {
  fill_input(small->gradients, ONEBIT_FLOAT32, SMALL, 0, step);
  CHECK_STATUS(onebit_optimizer_step(small->optimizer, 0.01f), ONEBIT_OK);
}

static struct small *make_small(int steps, size_t freeze_step) {
  struct small *small = allocate(1, sizeof *small);
  const onebit_tensor_t tensors[] = {
      {.parameter = small->parameters, .gradient = small->gradients, .count = 40},
      {.parameter = small->parameters + 40,
       .gradient = small->gradients + 40,
       .count = 5,
       .uncompressed = 1}};
  onebit_adam_options_t options = {
      .size = sizeof options, .freeze_step = freeze_step, .beta2 = 0.7, .common.block_size = 32};
  fill_input(small->parameters, ONEBIT_FLOAT32, SMALL, 50, steps);
  CHECK_STATUS(onebit_comm_create_self(&small->comm), ONEBIT_OK);
  CHECK_STATUS(onebit_adam_create(small->comm, tensors, 2, &options, &small->optimizer), ONEBIT_OK);
  for (int step = 0; step < steps; step++)
    small_step(small, step);
  return small;
}

static void free_small(struct small *small) {
  onebit_optimizer_destroy(small->optimizer);
  onebit_comm_destroy(small->comm);
  free(small);
}

static onebit_status_t load_small(struct small *small, const void *part, size_t bytes) {
  const void *parts[] = {part};
  return onebit_optimizer_load(small->optimizer, parts, &bytes, 1);
}

/* The recorded state of an optimizer. The optimizer is unchanged if it still saves the same part
 * and has the same parameters. */
struct unchanged {
  struct small *small;
  unsigned char *part;
  float parameters[SMALL];
  size_t bytes;
};

static struct unchanged capture_state(struct small *small) {
  struct unchanged unchanged = {.small = small};
  unchanged.part = optimizer_part(small->optimizer, &unchanged.bytes);
  memcpy(unchanged.parameters, small->parameters, sizeof small->parameters);
  return unchanged;
}

static bool check_unchanged(const struct unchanged *unchanged) {
  size_t bytes = 0;
  unsigned char *part = optimizer_part(unchanged->small->optimizer, &bytes);
  bool same = CHECK(bytes == unchanged->bytes && memcmp(part, unchanged->part, bytes) == 0,
                    "the optimizer has changed");
  free(part);
  return same && CHECK_BITS("parameters", unchanged->small->parameters, unchanged->parameters,
                            SMALL, ONEBIT_FLOAT32);
}

/* Checksums must be those of docs/checkpoints.md; otherwise existing checkpoints could not be
 * loaded. */
Test(checkpoint_damage, checksums_are_those_of_the_format) {
  uint64_t words[6];
  for (uint64_t i = 0; i < 6; i++)
    words[i] = i * i + 1;
  struct ob_checksum sum = ob_checksum_begin();
  ob_checksum_add(&sum, words, sizeof words);
  cr_expect_eq(ob_checksum_end(&sum), 0x8e96f72e3615cf06);
}

/* The training stages to test, in each of which a part has different sections. */
static const struct {
  int steps;
  size_t freeze_step;
} stages[] = {{2, 0}, {3, 3}, {5, 3}};

static void flip_every_bit(int steps, size_t freeze_step) {
  struct small *saved = make_small(steps, freeze_step), *other = make_small(1, freeze_step);
  size_t bytes;
  unsigned char *part = optimizer_part(saved->optimizer, &bytes);
  struct unchanged unchanged = capture_state(other);
  for (size_t k = 0, bit; (bit = sample_entry(k)) < 8 * bytes; k++) {
    part[bit / 8] ^= (unsigned char)(1 << bit % 8);
    onebit_status_t status = load_small(other, part, bytes);
    if (!CHECK(status == ONEBIT_ERROR_CHECKPOINT, "bit %zu of %zu bytes: status %d", bit, bytes,
               (int)status))
      break;
    part[bit / 8] ^= (unsigned char)(1 << bit % 8);
  }
  check_unchanged(&unchanged);
  CHECK_STATUS(load_small(other, part, bytes), ONEBIT_OK);
  CHECK_BITS("parameters", other->parameters, saved->parameters, SMALL, ONEBIT_FLOAT32);
  checks_must_hold();
  free(part);
  free(unchanged.part);
  free_small(saved);
  free_small(other);
}

Test(checkpoint_damage, every_bit_that_flips_is_found) {
  for (size_t k = 0; k < sizeof stages / sizeof stages[0]; k++)
    flip_every_bit(stages[k].steps, stages[k].freeze_step);
}

/* Loads a part that is cut off, after each of its bytes in turn. The memory ends at that byte, so
 * that a read beyond it is noticed. */
static void cut_after_every_byte(int steps, size_t freeze_step) {
  struct small *saved = make_small(steps, freeze_step);
  size_t bytes;
  unsigned char *part = optimizer_part(saved->optimizer, &bytes);
  struct unchanged unchanged = capture_state(saved);
  char words[64];
  for (size_t k = 0, length; (length = sample_entry(k)) < bytes; k++) {
    struct guarded cut = guarded_create(length, GUARD_ABOVE);
    memcpy(cut.data, part, length);
    CHECK_STATUS(load_small(saved, cut.data, length), ONEBIT_ERROR_CHECKPOINT);
    CHECK_WORDS("part 0: it is truncated: ");
    snprintf(words, sizeof words, "%zu of %zu bytes", length, bytes);
    if (length >= PART_ROWS && !CHECK_WORDS(words))
      break;
    guarded_destroy(&cut);
  }
  check_unchanged(&unchanged);
  unsigned char *longer = allocate(1, bytes + 8);
  memcpy(longer, part, bytes);
  CHECK_STATUS(load_small(saved, longer, bytes + 8), ONEBIT_ERROR_CHECKPOINT);
  checks_must_hold();
  free(longer);
  free(part);
  free(unchanged.part);
  free_small(saved);
}

Test(checkpoint_damage, cut_off_after_every_byte) {
  for (size_t k = 0; k < sizeof stages / sizeof stages[0]; k++)
    cut_after_every_byte(stages[k].steps, stages[k].freeze_step);
}

/* Loads parts whose checksums are correct, but whose sections do not fit the part or the
 * parameters. */
Test(checkpoint_damage, sections_beyond_what_there_is) {
  struct small *saved = make_small(2, 0);
  size_t bytes;
  unsigned char *part = optimizer_part(saved->optimizer, &bytes), *longer = allocate(1, bytes + 8);
  struct ob_part_header *header = (struct ob_part_header *)(void *)longer;
  memcpy(longer, part, bytes);
  header->bytes += 8;
  part_sign(longer);
  CHECK_STATUS(load_small(saved, longer, bytes + 8), ONEBIT_ERROR_CHECKPOINT);
  CHECK_WORDS("its sections end at byte");
  memcpy(longer, part, bytes);
  struct ob_part_section *section =
      (struct ob_part_section *)(void *)(longer + sizeof *header +
                                         header->tensors * sizeof(struct ob_part_tensor));
  while (section->what != OB_SAVED_PARAMETERS)
    section++;
  section->first = 1;
  part_sign(longer);
  CHECK_STATUS(load_small(saved, longer, bytes), ONEBIT_ERROR_CHECKPOINT);
  CHECK_WORDS("elements from element 1 on, but the");
  checks_must_hold();
  free(longer);
  free(part);
  free_small(saved);
}

/* --- Malicious parts. Each number of the header is replaced by several harmful ones, with correct
 * checksums. A part that loads without an error must give a state that can make a step. */

static void try_number(struct small *other, unsigned char *part, size_t bytes,
                       const unsigned char *good, size_t at, size_t width, uint64_t number) {
  memcpy(part, good, bytes);
  memcpy(part + at, &number, width);
  uint64_t front = part_number(part, PART_FRONT), tensors = part_number(part, PART_TENSORS);
  if (front <= bytes && front % 8 == 0 && tensors < 100)
    part_sign(part);
  onebit_status_t status = load_small(other, part, bytes);
  CHECK(status == ONEBIT_OK || status == ONEBIT_ERROR_CHECKPOINT, "byte %zu as %llu: status %d", at,
        (unsigned long long)number, (int)status);
  if (status != ONEBIT_OK)
    return;
  small_step(other, 3);
  CHECK_STATUS(load_small(other, good, bytes), ONEBIT_OK);
}

static void try_every_number(int steps, size_t freeze_step) {
  static const uint64_t numbers[] = {0,
                                     1,
                                     2,
                                     7,
                                     41,
                                     0x7fffffff,
                                     0x80000000,
                                     0xffffffff,
                                     0x100000000,
                                     0x3fffffffffffffff,
                                     0x7fffffffffffffff,
                                     0x8000000000000000,
                                     0xfffffffffffffff8,
                                     0xffffffffffffffff,
                                     0x7ff0000000000000,
                                     0x7ff8000000000000};
  struct small *saved = make_small(steps, freeze_step), *other = make_small(1, freeze_step);
  size_t bytes;
  unsigned char *good = optimizer_part(saved->optimizer, &bytes), *part = allocate(1, bytes);
  size_t front = part_number(good, PART_FRONT);
  const size_t sizes[] = {(front - PART_VERSION) / 4, sizeof numbers / sizeof numbers[0]};
  const struct sample sample = sample_product("checkpoint_harm", 1, sizes, 2);
  for (size_t k = 0; k < sample.count; k++) {
    const size_t at = PART_VERSION + 4 * (sample.rows[k] % sizes[0]);
    const uint64_t number = numbers[sample.rows[k] / sizes[0]];
    try_number(other, part, bytes, good, at, 4, number);
    if (at + 8 <= front)
      try_number(other, part, bytes, good, at, 8, number);
  }
  checks_must_hold();
  free(sample.rows);
  free(good);
  free(part);
  free_small(saved);
  free_small(other);
}

Test(checkpoint_damage, numbers_that_may_hurt) {
  for (size_t k = 0; k < sizeof stages / sizeof stages[0]; k++)
    try_every_number(stages[k].steps, stages[k].freeze_step);
}
