/*
 * The counters of onebit/counters.h in a program that is not preloaded: nothing has been counted.
 * What they count is tried with programs that are (tests/scripts/check-preload).
 */
#include <criterion/criterion.h>
#include <string.h>

#include "dropin/reason.h"
#include "onebit/counters.h"
#include "tests/support.h"

Test(counters, are_zero_where_nothing_is_preloaded) {
  onebit_counters_t counters, none = {.size = sizeof none};
  memset(&counters, 0x5a, sizeof counters);
  counters.size = sizeof counters;
  CHECK_STATUS(onebit_counters_get(&counters), ONEBIT_OK);
  CHECK(memcmp(&counters, &none, sizeof none) == 0, "something was counted");
  CHECK_STATUS(onebit_counters_get(NULL), ONEBIT_ERROR_ARGUMENT);
  counters.size--;
  CHECK_STATUS(onebit_counters_get(&counters), ONEBIT_ERROR_ARGUMENT);
}

Test(counters, reasons_have_words_and_other_places_none) {
  CHECK(onebit_counters_reason(OB_REASON_NONE) == NULL, "the first is no reason");
  for (size_t reason = OB_REASON_NONE + 1; reason < OB_REASON_COUNT; reason++)
    CHECK(onebit_counters_reason(reason) && *onebit_counters_reason(reason), "reason %zu", reason);
  CHECK(onebit_counters_reason(OB_REASON_COUNT) == NULL, "a place that is not used");
  CHECK(onebit_counters_reason((size_t)-1) == NULL, "no place");
}
