/*
 * Common functions of the tests: ranks as threads, checks that these threads can make,
 * gradient-like data, buffers between guard pages, and comparison to the bit.
 *
 * A check that fails is recorded with its rank and case, and the test continues, because the other
 * ranks would wait for the messages of a rank that ended early. The test fails at its end, or at
 * the end of on_ranks().
 *
 * This file includes the headers that nearly every test needs. tests/rules.mk defines _GNU_SOURCE.
 */
#ifndef ONEBIT_TESTS_SUPPORT_H
#define ONEBIT_TESTS_SUPPORT_H

#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "onebit/onebit.h"
#include "tests/support_sample.h"

/* The group sizes that the project promises to test, and element counts around multiples of words,
 * blocks and runs. */
extern const int test_sizes[];
extern const size_t test_sizes_count;
extern const size_t test_counts[];
extern const size_t test_counts_count;

/* The default options, but with the exchange schedule. With the default schedule the library could
 * choose another one over MPI. */
#define EXCHANGE_OPTIONS_INIT                                                                      \
  { .size = sizeof(onebit_plan_options_t), .schedule = ONEBIT_SCHEDULE_EXCHANGE }

/* ---- Tests ---- */

/* Criterion's Test with checks_must_hold() at its end. A test that runs longer than TEST_SECONDS is
 * ended. The thread sanitizer makes tests up to ten times slower. */
#ifndef TEST_SECONDS
#ifdef __SANITIZE_THREAD__
#define TEST_SECONDS 1500
#else
#define TEST_SECONDS 300
#endif
#endif
#undef Test
#define Test(...) CHECKED_TEST(__VA_ARGS__, .sentinel_ = 0)
#define CHECKED_TEST(suite, name, ...)                                                             \
  static void suite##_##name##_body(void);                                                         \
  CR_TEST_BASE(suite, name, .timeout = TEST_SECONDS, __VA_ARGS__) {                                \
    suite##_##name##_body();                                                                       \
    checks_must_hold();                                                                            \
  }                                                                                                \
  static void suite##_##name##_body(void)

/* ---- Checks (support.c) ---- */

/* Records a failure, with a message in printf's format, if `holds` is false. Returns `holds`. */
#define CHECK(condition, ...) check_note((condition), __FILE__, __LINE__, __VA_ARGS__)
bool check_note(bool holds, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Checks that a call of the library returned `wanted`. If not, the failure contains the library's
 * message. */
#define CHECK_STATUS(call, wanted) check_status((call), (wanted), #call, __FILE__, __LINE__)
bool check_status(onebit_status_t got, onebit_status_t wanted, const char *call, const char *file,
                  int line);

/* Checks that the message of this thread's latest error contains `part`. */
#define CHECK_WORDS(part) check_words((part), __FILE__, __LINE__)
bool check_words(const char *part, const char *file, int line);

/* Set the labels of this thread's later failures: the case, and the rank (-1: no rank). */
void check_case(const char *format, ...) __attribute__((format(printf, 1, 2)));
void check_rank(int rank);

/* Makes the Criterion test fail, with the messages of the first failures, if any check so far has
 * failed. */
void checks_must_hold(void);

/* ---- Ranks (support.c) ---- */

/* The body of one rank. The communicator is destroyed after it returns. */
typedef void rank_body(onebit_comm_t comm, void *context);

/* Runs the body on `size` threads as ranks, over a loopback communicator, and calls
 * checks_must_hold() afterwards. */
void on_ranks(int size, rank_body *body, void *context);

/* Runs the body like on_ranks, on ranks spread over `hosts` hosts. */
void on_hosts(int size, int hosts, rank_body *body, void *context);

/* Waits until all ranks of comm have called this function. It calls a collective on a dense plan
 * without elements. */
void synchronize_ranks(onebit_comm_t comm);

/* Returns a communicator of one rank. Ends the test if it cannot be created. */
onebit_comm_t self_comm(void);

/* Return the info of a handle. */
onebit_plan_info_t plan_info(onebit_plan_t plan);
onebit_optimizer_info_t optimizer_info(onebit_optimizer_t optimizer);
onebit_outer_info_t outer_info(onebit_outer_t outer);

/* Sets ONEBIT_CODEC to this codec and returns true if this machine can run it. Otherwise unsets the
 * variable and returns false. "" means the library's own choice. Call it only while no other thread
 * runs. */
bool use_codec(const char *name);

/* The codecs to test. */
extern const char *const test_codecs[];
extern const size_t test_codecs_count;

/* ---- Data (support.c) ---- */

/* Returns element i of a rank's input at a step. The input does not repeat with any size that the
 * library uses. As in gradients, magnitudes differ between regions. Some elements and blocks are
 * zero. The input is the same on every machine. */
float input_value(size_t i, int rank, int step);
void fill_input(void *buffer, onebit_dtype_t dtype, size_t count, int rank, int step);

/* Returns a number in [-1, 1) for each value of `place`, computed by splitmix64. */
float uniform_value(uint64_t place);

size_t dtype_size(onebit_dtype_t dtype);
const char *dtype_name(onebit_dtype_t dtype);

/* Memory with an inaccessible page before and after it. BELOW: the data begins where the page
 * before it ends. ABOVE: the data ends where the page after it begins, so its alignment depends on
 * `bytes`. */
enum guard { GUARD_BELOW, GUARD_ABOVE };
struct guarded {
  void *data;
  void *mapping;
  size_t mapped;
};
struct guarded guarded_create(size_t bytes, enum guard guard);
void guarded_destroy(struct guarded *buffer);

/* fill_pattern fills bytes with a pattern that no result has. pattern_holds checks that the whole
 * pattern is still there. */
void fill_pattern(void *buffer, size_t bytes);
bool pattern_holds(const void *buffer, size_t bytes);

/* Checks that two arrays of dtype are equal to the bit. The failure names the first difference and
 * the number of differences. */
#define CHECK_BITS(what, actual, wanted, count, dtype)                                             \
  check_bits((what), (actual), (wanted), (count), (dtype), __FILE__, __LINE__)
bool check_bits(const char *what, const void *actual, const void *wanted, size_t count,
                onebit_dtype_t dtype, const char *file, int line);

/* Calls calloc and ends the test when there is no memory. */
void *allocate(size_t count, size_t size);

/* ---- Running programs and checking their output (support.c) ---- */

/* Runs a program of the build directory ($BUILD, or build) as a user runs it. The formatted text is
 * its name and arguments, as in a shell. Checks that its exit status is `wanted`. Returns its
 * stdout and stderr, which are valid until the next call. */
const char *program(int wanted, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Splits the formatted line at its spaces into argv, which ends with NULL. Returns the number of
 * words. The words are valid until the next call. */
int split_line(char *argv[], const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Checks that the output `said` contains `part`. */
void expect_output(const char *said, const char *part);

/* Returns true if the whole text is one JSON object (RFC 8259). */
bool json_is_valid(const char *text);

#endif
