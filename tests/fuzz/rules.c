/* Fuzzes the rules for a preloaded program, and the decisions that they give for calls. */
#include "dropin/rules.h"

#include "base/error.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const size_t counts[] = {1, 7, 1000, 1 << 20, SIZE_MAX / 64};
  struct ob_rules rules, again;
  char *text = fuzz_copy(data, size, 0);
  onebit_status_t status = ob_rules_parse("rules", text, size, &rules);
  FUZZ_CHECK(status == ONEBIT_OK || (status == ONEBIT_ERROR_ARGUMENT && *onebit_last_error()));
  if (status == ONEBIT_OK) {
    FUZZ_CHECK(ob_rules_parse("rules", text, size, &again) == ONEBIT_OK &&
               ob_rules_hash(&rules) == ob_rules_hash(&again));
    for (int operation = ONEBIT_ALLREDUCE; operation <= ONEBIT_REDUCE_SCATTER; operation++)
      for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        enum ob_reason reason =
            ob_rules_judge(&rules, (onebit_operation_t)operation, ONEBIT_FLOAT32, counts[i], 4);
        FUZZ_CHECK(reason != OB_REASON_NONE ||
                   counts[i] >= ob_rules_min_count(&rules, (onebit_operation_t)operation));
      }
  }
  free(text);
  return 0;
}
