/*
 * Parts of checkpoints, of one rank or of two, into an optimizer of one rank. What is refused
 * changes nothing, and with what is accepted steps can be made.
 */
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/optimizers.h"
#include "tests/fuzz/parts_input.h"

static unsigned char *saved(onebit_optimizer_t optimizer, size_t *bytes) {
  FUZZ_CHECK(onebit_optimizer_save(optimizer, NULL, 0, bytes) == ONEBIT_OK);
  unsigned char *memory = calloc(1, *bytes);
  FUZZ_CHECK(memory && onebit_optimizer_save(optimizer, memory, *bytes, bytes) == ONEBIT_OK);
  return memory;
}

static void load(const struct fuzz_parts *parts) {
  struct fuzz_optimizer made;
  onebit_comm_t comm;
  size_t before_bytes, after_bytes;
  FUZZ_CHECK(onebit_comm_create_self(&comm) == ONEBIT_OK);
  FUZZ_CHECK(fuzz_optimizer_create(&made, parts->kind % FUZZ_OPTIMIZERS, comm) == ONEBIT_OK);
  unsigned char *before = saved(made.optimizer, &before_bytes);
  if (onebit_optimizer_load(made.optimizer, (const void *const *)parts->part, parts->bytes,
                            parts->count) == ONEBIT_OK) {
    onebit_status_t status = fuzz_optimizer_train(&made, 2);
    FUZZ_CHECK(status == ONEBIT_OK || status == ONEBIT_SKIPPED);
  } else {
    unsigned char *after = saved(made.optimizer, &after_bytes);
    FUZZ_CHECK(before_bytes == after_bytes && memcmp(before, after, before_bytes) == 0);
    free(after);
  }
  free(before);
  onebit_optimizer_destroy(made.optimizer);
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
