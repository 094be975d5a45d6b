/*
 * The emulated device's own test, of the properties that other tests rely on. Prints failures, and
 * `N passed, N failed`.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "cuda_runtime.h"
#include "emulation.h"
#include "self_test.h"

std::atomic<int> passed, failed;

void expect(bool holds, const char *what, const char *file, int line) {
  (holds ? passed : failed)++;
  if (!holds)
    fprintf(stderr, "%s:%d: %s\n", file, line, what);
}

/* Runs the function in a child process and returns its message if it aborts. */
std::string words_of_abort(void (*function)()) {
  int ends[2];
  EXPECT(!pipe(ends));
  fflush(nullptr);
  pid_t child = fork();
  if (!child) {
    dup2(ends[1], 2);
    close(ends[0]);
    function();
    _exit(0);
  }
  close(ends[1]);
  std::string words;
  char part[512];
  for (ssize_t size; (size = read(ends[0], part, sizeof part)) > 0;)
    words.append(part, static_cast<size_t>(size));
  close(ends[0]);
  int status;
  waitpid(child, &status, 0);
  return status ? words + "the end" : "peace";
}

bool aborts_with(void (*function)(), const char *words) {
  std::string all = words_of_abort(function);
  if (all.find(words) != std::string::npos)
    return true;
  fprintf(stderr, "instead of '%s': %s\n", words, all.c_str());
  return false;
}

int main() {
  unsetenv("EMULATED_STREAMS");
  for (const char *order : {"forward", "backward", "shuffle"}) {
    setenv("EMULATED_ORDER", order, 1);
    test_threads();
  }
  unsetenv("EMULATED_ORDER");
  test_order();
  test_misuse();
  test_speed();
  test_streams();
  test_eager();
  test_memory();
  test_capture();
  test_nccl();
  test_communicators();
  test_driver();
  printf("%d passed, %d failed\n", passed.load(), failed.load());
  return failed != 0;
}
