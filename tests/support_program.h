/*
 * The built programs, run as a user runs them.
 */
#ifndef ONEBIT_TESTS_SUPPORT_PROGRAM_H
#define ONEBIT_TESTS_SUPPORT_PROGRAM_H

/* Runs a program of the build directory ($BUILD, or build); the format gives its name and arguments
 * as in a shell. Checks its exit status and returns its output of both streams, valid until the
 * next call. */
const char *program(int wanted, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Checks that `said` contains `part`. */
void expect_said(const char *said, const char *part);

#endif
