/* Fuzzes checkpoint manifests. If the library accepts a manifest and writes it again, the text must
 * be the same. */
#include "optimizers/checkpoint/directory.h"

#include <inttypes.h>
#include <stdio.h>

#include "base/hash.h"
#include "base/memory.h"
#include "tests/fuzz/fuzz.h"

/* Corrects the checksum in the last line, which covers all lines before it. */
static void correct_checksum(char *text, size_t size) {
  enum { LINE = sizeof "checksum 0123456789abcdef\n" - 1 };
  char line[LINE + 1];
  if (size < LINE)
    return;
  size_t before = size - LINE;
  snprintf(line, sizeof line, "checksum %016" PRIx64 "\n", ob_hash(OB_HASH_START, text, before));
  memcpy(text + before, line, LINE);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  struct ob_manifest manifest;
  if (size < 1)
    return 0;
  char *text = fuzz_copy(data + 1, size - 1, 0);
  if (data[0] & 1)
    correct_checksum(text, size - 1);
  if (ob_manifest_parse(&manifest, text, size - 1) == ONEBIT_OK) {
    char *again = ob_manifest_text(&manifest);
    FUZZ_CHECK(again && strlen(again) == size - 1 && memcmp(again, text, size - 1) == 0);
    ob_release(again);
  }
  ob_release(manifest.parts);
  free(text);
  return 0;
}
