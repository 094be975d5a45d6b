/*
 * The counters of onebit/counters.h in a program that is not preloaded: nothing has been counted.
 * What they count is tried with programs that are (tests/scripts/check-preload).
 */
#include "dropin/counters.h"
#include "onebit/counters.h"
#include "tests/support.h"

Test(counters, are_zero_where_nothing_is_preloaded) {
  onebit_counters_t counters, none = {.size = sizeof none};
  memset(&counters, 0x5a, sizeof counters);
  counters.size = sizeof counters;
  CHECK_STATUS(onebit_counters_get(&counters), ONEBIT_OK);
  CHECK(memcmp(&counters, &none, sizeof none) == 0, "something was counted");
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

/* Differences are of the latest samples, in squares: each tensor has its own. */
Test(counters, differences_from_exact_sums_are_of_the_latest) {
  static struct ob_record record;
  for (int i = 0; i < OB_SHADOW_SAMPLES; i++)
    ob_record_shadowed(&record, 1, 0.25, 1, false);
  ob_record_shadowed(&record, 2, 4, 16, false);
  const struct ob_record_shadow *second = atomic_load(&record.shadows), *first = second->next;
  CHECK(second->tensor == 2 && first->tensor == 1 && !first->next, "tensors are not listed");
  cr_expect_float_eq(ob_record_difference(first), 0.5, 1e-12);
  cr_expect_float_eq(ob_record_difference(second), 0.5, 1e-12);
  for (int i = 0; i < OB_SHADOW_SAMPLES; i++)
    ob_record_shadowed(&record, 1, 0.01, 1, i == 0);
  cr_expect_float_eq(ob_record_difference(first), 0.1, 1e-12);
  cr_expect_float_eq(first->largest, 0.5, 1e-12);
  CHECK(first->refused && !second->refused, "the wrong tensor is exact");
  ob_record_shadowed(&record, 3, 0, 0, false);
  CHECK(ob_record_difference(atomic_load(&record.shadows)) == 0, "of sums that are zero");
  ob_record_shadowed(NULL, 1, 1, 1, false);
}
