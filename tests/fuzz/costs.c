/* Fuzzes the lines of a tuning file that contain measured times of whole calls. The lines that
 * every tuning file must have are not fuzzed. */
#include "tests/fuzz/costs.h"

#include "collectives/cost/tuning.h"

static void read_line(struct ob_cost_measured *measured, char *line) {
  static const char correction[] = "correction ", chunk[] = "chunk ";
  char wrong[OB_TUNING_WRONG_CAPACITY] = "";
  struct ob_cost_measured before = *measured;
  if (strncmp(line, correction, sizeof correction - 1) == 0)
    ob_tuning_read_correction(measured, line + sizeof correction - 1, wrong);
  else if (strncmp(line, chunk, sizeof chunk - 1) == 0)
    ob_tuning_read_chunk(measured, line + sizeof chunk - 1, wrong);
  FUZZ_CHECK(!*wrong || memcmp(&before, measured, sizeof before) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  struct ob_costs costs;
  char *text = fuzz_copy(data, size, 1);
  ob_costs_default(NULL, &costs);
  costs.hosts = 2;
  costs.ranks_per_host = 3;
  for (char *line = text, *next; line; line = next) {
    next = strchr(line, '\n');
    if (next)
      *next++ = '\0';
    read_line(&costs.measured, line);
  }
  fuzz_choose(&costs);
  free(text);
  return 0;
}
