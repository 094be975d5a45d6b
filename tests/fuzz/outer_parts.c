/*
 * The same of outer steps: parts of one rank or of two, into one of one rank. What is refused
 * changes nothing, and with what is accepted steps can be made.
 */
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/optimizers.h"
#include "tests/fuzz/parts_input.h"

static unsigned char *saved(onebit_outer_t outer, size_t *bytes) {
  FUZZ_CHECK(onebit_outer_save(outer, NULL, 0, bytes) == ONEBIT_OK);
  unsigned char *memory = calloc(1, *bytes);
  FUZZ_CHECK(memory && onebit_outer_save(outer, memory, *bytes, bytes) == ONEBIT_OK);
  return memory;
}

static void load(const struct fuzz_parts *parts) {
  struct fuzz_outer made;
  onebit_comm_t comm;
  size_t before_bytes, after_bytes;
  FUZZ_CHECK(onebit_comm_create_self(&comm) == ONEBIT_OK);
  FUZZ_CHECK(fuzz_outer_create(&made, parts->kind % FUZZ_OUTER_STEPS, comm) == ONEBIT_OK);
  unsigned char *before = saved(made.outer, &before_bytes);
  if (onebit_outer_load(made.outer, (const void *const *)parts->part, parts->bytes, parts->count) ==
      ONEBIT_OK) {
    onebit_status_t status = fuzz_outer_train(&made, 5);
    FUZZ_CHECK(status == ONEBIT_OK || status == ONEBIT_SKIPPED);
  } else {
    unsigned char *after = saved(made.outer, &after_bytes);
    FUZZ_CHECK(before_bytes == after_bytes && memcmp(before, after, before_bytes) == 0);
    free(after);
  }
  free(before);
  onebit_outer_destroy(made.outer);
  onebit_comm_destroy(comm);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  struct fuzz_parts parts;
  if (!fuzz_parts_read(&parts, data, size))
    return 0;
  load(&parts);
  fuzz_parts_free(&parts);
  return 0;
}
