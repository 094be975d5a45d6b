/* The walk over a kernel's cases. */
#include "tests/gpu/kernel_test.h"

#include <stdlib.h>

#include "tests/gpu/harness.h"

/* Enough for the longest dense messages of eight members. */
#define ROOM ((size_t)64 << 20)

void kernel_expect_flags(struct scene *scene, bool server) {
  struct ob_work *work = &scene->host.state->work;
  scene->state->flags |= work->not_finite ? (uint32_t)OB_FLAG_NOT_FINITE : 0;
  scene->state->flags |= work->large ? (uint32_t)OB_FLAG_LARGE : 0;
  scene->state->server_flags |= server && work->large ? (uint32_t)OB_FLAG_LARGE : 0;
}

static void run_case(const struct kernel_test *test, struct twin *twin,
                     const struct scene_case *what) {
  struct scene scene;
  scene_create(&scene, twin, what);
  bool sent = twin_send(twin);
  size_t end = test->once ? scene.first_chunk + 1 : scene.end_chunk;
  for (size_t chunk = scene.first_chunk; sent && chunk < end; chunk++) {
    test->host(&scene, chunk);
    CHECK_CUDA(test->device(&scene, chunk));
  }
  if (sent && twin_fetch(twin)) {
    if (test->even_out)
      test->even_out(&scene);
    CHECK_TWIN(twin);
  }
  scene_destroy(&scene);
}

void kernel_walk(const struct kernel_test *test) {
  struct twin twin;
  size_t walked = 0;
  if (!twin_create(&twin, ROOM))
    return;
  const struct sample sample = kernel_cases_sample(&test->cases);
  for (size_t i = 0; i < sample.count; i++) {
    struct scene_case what;
    char words[240];
    if (!kernel_case(&test->cases, sample.rows[i], &what))
      continue;
    scene_describe(&what, words, sizeof words);
    check_case("case %zu: %s", sample.rows[i], words);
    run_case(test, &twin, &what);
    walked++;
  }
  check_case("%s", "");
  CHECK(walked > 0, "the share leaves no case");
  free(sample.rows);
  twin_destroy(&twin);
}
