/*
 * A sheet: passes over memory, and steps made of them, timed by turns, with a row for each: the
 * bytes that it must move, and its ratio to baselines of the same round. codec, adam and optimizers
 * are sheets (bench_steps.c), on the host and on a device.
 */
#ifndef BENCH_SHEET_H
#define BENCH_SHEET_H

#include "bench/bench_passes.h"

/* The entries of a sheet. Copies: all are compared with their bytes a second, each of them or on a
 * device the better one. Dense steps: the better one's time is a unit. Other passes: the last
 * `parts` before a reduction are those of a step. Reductions: one for each number of streams; a
 * rank does a P-th of it. */
struct bench_list {
  const char *name; /* of the step, or NULL */
  size_t copies, dense, parts;
  const struct bench_pass *passes[20];
};

struct bench_sheet {
  struct bench_job *job;
  struct bench_passes *passes;
  const struct bench_list *list;
  struct bench_rounds rounds;
  size_t reduce; /* the first reduction */
  double *sums;
};

/* Makes entries of all of the list, to be timed by bench_rounds_measure. Returns an exit status; a
 * sheet is to be destroyed in any case. */
int bench_sheet_create(struct bench_job *job, struct bench_passes *passes,
                       const struct bench_list *list, struct bench_sheet *sheet);
void bench_sheet_destroy(struct bench_sheet *sheet);

/* Prints notes: of the benchmark, before the first size, and of the arrays. */
void bench_sheet_notes(const struct bench_sheet *sheet, const char *about, const char *columns);
void bench_sheet_heads(const struct bench_sheet *sheet);
/* The dense step whose time is the unit. */
const struct bench_entry *bench_sheet_dense(const struct bench_sheet *sheet);
/* Prints a row of an entry, or of one that was measured elsewhere and has no times by round. */
void bench_sheet_row(const struct bench_sheet *sheet, const struct bench_entry *entry);
/* Makes the sum of the parts and, where `reduce` is not NULL, of a P-th of that reduction. */
void bench_sheet_sum(const struct bench_sheet *sheet, const char *name,
                     const struct bench_entry *reduce);

#endif
