/*
 * The ranks of a training: starting them, and numbers that all of them learn.
 */
#ifndef EXAMPLES_TRAIN_TEAM_H
#define EXAMPLES_TRAIN_TEAM_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "onebit/onebit.h"

enum { NUMBERS = 64 };

typedef struct team {
  onebit_comm_t comm;
  size_t rank, size;
  onebit_plan_t plan; /* dense allreduce of NUMBERS floats */
  int quiet;          /* nothing is to be said */
} team_t;

/* The work of each rank; returns its exit status. */
typedef int rank_body_t(team_t *team, const void *context);

/* Runs the body on every rank: as many threads of this process as asked for; or for 0 the processes
 * that torchrun, or the like, or MPI started, and in a build without MPI one rank. Where WORLD_SIZE
 * and MASTER_ADDR are in the environment the processes talk over the library's sockets. Returns the
 * exit status. The program's name stands before all complaints. */
int team_run(const char *program, size_t threads, rank_body_t *body, const void *context);

/* Prints on one rank for all. */
#define say(team, ...) (speaks(team) ? (void)printf(__VA_ARGS__) : (void)0)

static inline int speaks(const team_t *team) { return team->rank == 0 && !team->quiet; }

void complain(const team_t *team, const char *words);

/* Returns 0, or -1 after printing the library's message. */
int check(const team_t *team, onebit_status_t status, const char *what);

/* Says why and ends the process: for what cannot be agreed on, because other ranks may be waiting
 * for this one. */
void give_up(const char *what, const char *why);

/* Replaces each number by its mean over the ranks. 0, or -1 after saying why. */
int mean(const team_t *team, float numbers[NUMBERS], const char *what);

/* 0 when every rank is well; else -1 on every rank, after rank 0 has said its words, or, if rank 0
 * is well, each rank that is not. */
int agree(const team_t *team, int well, const char *words);

/* Returns 1 when all ranks have the same bits, else 0. */
int same(const team_t *team, uint64_t bits);

#endif
