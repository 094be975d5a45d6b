/* codec_digest NAME: runs the codec NAME on the table of codec cases and prints a digest of each
 * case's output. If two processors print equal lines, their results have the same bits.
 * test_codec.c records the last lines. With ONEBIT_TEST_SHARE=5 a fifth of the cases runs. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/hash.h"
#include "tests/codec_cases.h"
#include "tests/golden_cases.h"

int main(int count, char **arguments) {
  const struct ob_codec *codec;
  if (count != 2 || ob_codec_find(arguments[1], &codec) != ONEBIT_OK) {
    fprintf(stderr, "usage: codec_digest CODEC%s%s\n", count == 2 ? ": " : "", onebit_last_error());
    return 2;
  }
  const struct sample sample = codec_cases_sample();
  for (size_t i = 0; i < sample.count; i++) {
    char name[96];
    unsigned char *bytes;
    codec_case_name(sample.rows[i], name, sizeof name);
    size_t size = codec_case_run(sample.rows[i], codec, &bytes);
    printf("%s %zu %016" PRIx64 "\n", name, size, ob_hash(OB_HASH_START, bytes, size));
    free(bytes);
  }
  free(sample.rows);
  for (size_t i = 0; i < golden_count(); i++) {
    const struct golden made = golden_run(i, codec);
    printf("{\"%s\", 0x%016" PRIx64 ", 0x%016" PRIx64 ", 0x%016" PRIx64 "},\n", made.name,
           made.messages, made.residuals, made.results);
  }
  return 0;
}
