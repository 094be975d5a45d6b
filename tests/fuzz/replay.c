/* The text of a recorded case, which says how long its files are. */
#include "tools/replay/replay.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  struct replay_case recorded = {.directory = "a case", .text = fuzz_copy(data, size, 1)};
  char error[REPLAY_ERROR] = "";
  for (size_t i = 0; i < REPLAY_FILES; i++)
    recorded.files[i].number = -1;
  bool good = replay_case_parse(&recorded, error);
  FUZZ_CHECK(good == !*error && strlen(error) < sizeof error);
  if (good) {
    FUZZ_CHECK(recorded.world > 0 && recorded.steps > 0 && recorded.count > 0);
    FUZZ_CHECK(recorded.kind != REPLAY_ALLREDUCE || recorded.padded % recorded.world == 0);
    FUZZ_CHECK(recorded.kind == REPLAY_ALLREDUCE || strlen(recorded.dense_steps) == recorded.steps);
  }
  replay_case_close(&recorded);
  return 0;
}
