/* Fuzzes the reader of ONEBIT_CONFIG files. The values of an accepted file must point into the
 * file's text, and each value must follow its parent. */
#include "base/json.h"

#include <string.h>

#include "tests/fuzz/fuzz.h"

enum { CAPACITY = 256 };

static void check_text(const char *text, const char *from, size_t size) {
  FUZZ_CHECK(!text || (text >= from && text < from + size && strlen(text) < size));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static struct ob_json_value values[CAPACITY];
  size_t count = 0;
  char *text = fuzz_copy(data, size, 1);
  onebit_status_t status = ob_json_read("file", text, values, CAPACITY, &count);
  FUZZ_CHECK(status == ONEBIT_OK ? count > 0 : status == ONEBIT_ERROR_ARGUMENT);
  for (size_t k = 0; status == ONEBIT_OK && k < count; k++) {
    const int parent = values[k].parent;
    FUZZ_CHECK(k ? parent >= 0 && parent < (int)k : parent == -1);
    FUZZ_CHECK(!k || values[parent].kind == (values[k].key ? OB_JSON_OBJECT : OB_JSON_ARRAY));
    check_text(values[k].key, text, size);
    check_text(values[k].text, text, size);
    if (values[k].kind == OB_JSON_REAL)
      (void)strtod(values[k].text, NULL);
  }
  free(text);
  return 0;
}
