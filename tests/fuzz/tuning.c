/* Fuzzes tuning files: the cost model must be able to compute with an accepted file. */
#define _POSIX_C_SOURCE 200809L
#include "collectives/cost/tuning.h"

#include <math.h>
#include <stdio.h>

#include "tests/fuzz/costs.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const struct ob_tuning_here anywhere = {0};
  struct ob_costs costs;
  struct ob_tuning_origin origin;
  if (size == 0)
    return 0;
  FILE *file = fmemopen((void *)(uintptr_t)data, size, "r");
  FUZZ_CHECK(file);
  enum ob_tuning_state state = ob_tuning_parse(file, "a file", &anywhere, &costs, &origin);
  fclose(file);
  FUZZ_CHECK(state == OB_TUNING_READ || state == OB_TUNING_DAMAGED || state == OB_TUNING_NEWER);
  fuzz_choose(&costs);
  return 0;
}
