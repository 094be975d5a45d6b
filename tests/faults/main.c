/*
 * faults [--filter TEXT] [--every N] [--jobs N] [--list]: runs the rows of the table, several at a
 * time, and prints a summary. The exit status is 0 if every row had the promised outcome.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/faults/faults.h"

enum { MAX_JOBS = 16 };

/* A job that is running. */
struct running {
  pid_t process; /* the job's process, which leads a process group; 0: this entry is free */
  struct shared *shared;
  char path[64];
  double began;
  double continue_at[RANKS];
};

static struct {
  const char *program, *filter;
  size_t every;
  int jobs;
  struct running running[MAX_JOBS];
  uint64_t expected[TRANSPORTS][WORKS]; /* the hash of a run without a fault */
  struct {
    size_t runs, survived, told, hung, wrong, broken, left;
    size_t killed;  /* ranks killed during calls, in jobs over TCP */
    double noticed; /* the longest time in seconds from a kill to the last rank's error */
  } counts;
} faults = {.every = 1, .jobs = 6};

/* True for rows that lose a rank for good. The error of at least one other rank must then name the
 * lost rank. Over NCCL, errors name no rank. */
static bool is_lost(const struct row *row) {
  return row->promise == TELLS && row->transport != NCCL &&
         (row->fault == KILLED || row->fault == FORKED || row->fault == LEFT ||
          row->fault == SILENT || row->fault == NO_FILES);
}

static bool is_named(const struct shared *shared) {
  char name[16];
  snprintf(name, sizeof name, "rank %d", row_victim(&shared->row));
  for (int rank = 0; rank < RANKS; rank++)
    if (rank != row_victim(&shared->row) && strstr(shared->records[rank].message, name))
      return true;
  return false;
}

/* --- A job begins */

static bool is_built(enum transport transport) {
#ifndef ONEBIT_HAVE_MPI
  if (transport == MPI)
    return false;
#endif
#if !defined(ONEBIT_HAVE_NCCL) || !defined(ONEBIT_EMULATED_CUDA)
  if (transport == NCCL)
    return false;
#endif
  return true;
}

static struct shared *map_shared(const char *path, bool create) {
  int file = open(path, create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);
  if (file < 0 || (create && ftruncate(file, sizeof(struct shared))))
    return NULL;
  struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return shared == MAP_FAILED ? NULL : shared;
}

static void run_case(struct shared *shared, const char *path) {
  setpgid(0, 0);
  /* Stderr is discarded: messages of launchers and warnings about long waits would make the summary
   * hard to read. */
  if (!freopen("/dev/null", "w", stderr))
    exit(3);
  if (shared->row.transport == MPI)
    run_mpi(shared, faults.program, path);
  else if (shared->row.transport == NCCL)
    run_nccl(shared);
  else if (shared->row.transport == THREADS)
    run_threads(shared);
  else
    run_processes(shared);
  exit(0);
}

static void give_up(const char *what) {
  perror(what);
  exit(3);
}

static void begin_job(struct running *running, const struct row *row) {
  static unsigned number;
  const char *base = getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp";
  *running = (struct running){.began = participant_clock()};
  snprintf(running->path, sizeof running->path, "%.30s/faults-%d-%u", base, (int)getpid(),
           number++);
  running->shared = map_shared(running->path, true);
  if (!running->shared)
    give_up(running->path);
  running->shared->row = *row;
  snprintf(running->shared->directory, sizeof running->shared->directory, "%.55s.files",
           running->path);
  fflush(stdout);
  running->process = fork();
  if (running->process < 0)
    give_up("fork");
  if (running->process == 0)
    run_case(running->shared, running->path);
}

/* --- While a job runs: the harness continues ranks that have stopped themselves */

static void continue_ranks(struct running *running) {
  for (int rank = 0; rank < RANKS; rank++) {
    struct record *record = &running->shared->records[rank];
    int pause = atomic_exchange(&record->paused, 0);
    if (pause)
      running->continue_at[rank] = participant_clock() + pause / 1000.0;
    if (running->continue_at[rank] > 0 && participant_clock() >= running->continue_at[rank]) {
      kill(record->process, SIGCONT);
      running->continue_at[rank] = 0;
    }
  }
}

/* --- The end of a run */

/* True if the row's fault prevents this rank from ending normally. */
static bool is_gone(const struct row *row, int rank) {
  return rank == row_victim(row) && (row->fault == KILLED || row->fault == FORKED ||
                                     row->fault == LEFT || row->fault == SILENT);
}

/* True if the launcher reports the error. Some MPI implementations end the whole job when they lose
 * a rank. */
static bool is_told_by_launcher(const struct shared *shared, int exit_status) {
  return shared->row.transport == MPI && exit_status != 0;
}

static const char *judge_rank(const struct shared *shared, int rank, int exit_status, bool hung) {
  const struct record *record = &shared->records[rank];
  const struct row *row = &shared->row;
  uint64_t expected = faults.expected[row->transport][row->work];
  if (atomic_load(&record->state) != ENDED)
    return !hung && is_told_by_launcher(shared, exit_status) ? "told" : "hung";
  if (record->status == ONEBIT_OK)
    return record->hash == expected ? "survived" : "wrong";
  if (record->status > 0)
    return "left";
  bool lacks = row->fault == NO_FILES && strstr(record->message, "Too many open files");
  return strstr(record->message, "rank") || lacks || row->transport == NCCL ? "told"
                                                                            : "told nothing";
}

static bool keeps_promise(enum promise promise, const char *verdict) {
  bool survived = !strcmp(verdict, "survived"), told = !strcmp(verdict, "told");
  return promise == SURVIVES ? survived : promise == TELLS ? told : survived || told;
}

static void explain_failure(const struct shared *shared, const char *what) {
  char name[96];
  row_name(&shared->row, name, sizeof name);
  printf("%-14s %s (the fault is on rank %d)\n", what, name, row_victim(&shared->row));
  for (int rank = 0; rank < RANKS; rank++) {
    const struct record *record = &shared->records[rank];
    printf("    rank %d: state %d, %s after %d calls: %s\n", rank, atomic_load(&record->state),
           onebit_status_string((onebit_status_t)record->status), record->calls, record->message);
  }
}

/* Measures the time from the kill of a process to the errors of the other ranks. Only TCP is
 * measured, where the operating system reports the death at once. */
static void measure_notice(const struct shared *shared) {
  const struct row *row = &shared->row;
  if (row->transport != TCP || (row->fault != KILLED && row->fault != FORKED) ||
      row->moment <= JOINING || row->promise != TELLS)
    return;
  faults.counts.killed++;
  for (int rank = 0; rank < RANKS; rank++) {
    double seconds = shared->records[rank].ended - shared->killed_at;
    if (rank != row_victim(row) && seconds > faults.counts.noticed)
      faults.counts.noticed = seconds;
  }
}

static void judge_job(const struct running *running, int exit_status, bool hung) {
  const struct shared *shared = running->shared;
  const struct row *row = &shared->row;
  const char *broken = NULL;
  size_t told = 0, survived = 0;
  if (row->fault == NONE)
    faults.expected[row->transport][row->work] = shared->records[0].hash;
  for (int rank = 0; rank < RANKS; rank++) {
    if (is_gone(row, rank) && !hung)
      continue;
    const char *verdict = judge_rank(shared, rank, exit_status, hung);
    told += !strcmp(verdict, "told");
    survived += !strcmp(verdict, "survived");
    faults.counts.hung += !strcmp(verdict, "hung");
    faults.counts.wrong += !strcmp(verdict, "wrong");
    if (!keeps_promise(row->promise, verdict) && !(hung && is_gone(row, rank)))
      broken = verdict;
  }
  if (!broken && is_lost(row) && !is_named(shared) && !is_told_by_launcher(shared, exit_status))
    broken = "unnamed";
  measure_notice(shared);
  faults.counts.runs++;
  faults.counts.told += told > 0;
  faults.counts.survived += told == 0 && survived > 0;
  faults.counts.broken += broken != NULL;
  if (broken)
    explain_failure(shared, broken);
}

static void remove_files(const char *directory) {
  char command[96];
  snprintf(command, sizeof command, "rm -rf '%s'", directory);
  if (system(command))
    perror(command);
}

/* Ends the job's process group. Processes of the group that still run after the job's first process
 * has ended count as left behind. */
static void end_job(struct running *running, int exit_status, bool hung) {
  bool others = kill(-running->process, hung ? SIGKILL : SIGTERM) == 0;
  faults.counts.left += !hung && others && running->shared->row.fault != SILENT &&
                        running->shared->row.fault != FORKED &&
                        running->shared->row.transport != MPI;
  if (hung)
    waitpid(running->process, NULL, 0);
  judge_job(running, exit_status, hung);
  remove_files(running->shared->directory);
  munmap(running->shared, sizeof *running->shared);
  unlink(running->path);
  running->process = 0;
}

static void watch_job(struct running *running) {
  int status = 0;
  continue_ranks(running);
  if (waitpid(running->process, &status, WNOHANG) == running->process)
    end_job(running, status, false);
  else if (participant_clock() - running->began > LIMIT)
    end_job(running, 0, true);
}

/* --- All jobs */

static size_t jobs_running(void) {
  size_t count = 0;
  for (int i = 0; i < faults.jobs; i++)
    count += faults.running[i].process != 0;
  return count;
}

static void watch_jobs(void) {
  for (int i = 0; i < faults.jobs; i++)
    if (faults.running[i].process)
      watch_job(&faults.running[i]);
  usleep(2000);
}

static struct running *find_free_place(void) {
  for (;; watch_jobs())
    for (int i = 0; i < faults.jobs; i++)
      if (!faults.running[i].process)
        return &faults.running[i];
}

static bool is_wanted(const struct row *row, size_t number) {
  char name[96];
  row_name(row, name, sizeof name);
  if (!is_built(row->transport))
    return false;
  if (row->fault == NONE) /* the results of other rows are compared with those of this row */
    return !faults.filter || !strncmp(name, faults.filter, strcspn(faults.filter, "/"));
  return number % faults.every == 0 && (!faults.filter || strstr(name, faults.filter));
}

/* Runs the rows without a fault, or the rows with one. main runs the rows without a fault first. */
static void run_rows(bool without_fault, bool list) {
  struct row row;
  char name[96];
  for (size_t number = 0; table_row(number, &row); number++) {
    if ((row.fault == NONE) != without_fault || !is_wanted(&row, number))
      continue;
    row_name(&row, name, sizeof name);
    if (list)
      puts(name);
    else
      begin_job(find_free_place(), &row);
  }
  while (jobs_running())
    watch_jobs();
}

/* Counts the shared-memory files that the jobs have left behind. */
static size_t count_leftovers(void) {
  size_t count = 0;
  DIR *directory = opendir("/dev/shm");
  for (struct dirent *entry; directory && (entry = readdir(directory));)
    if (!strncmp(entry->d_name, "onebit-", 7)) {
      printf("left behind    /dev/shm/%s\n", entry->d_name);
      count++;
    }
  if (directory)
    closedir(directory);
  return count;
}

static int run_table(void) {
  double began = participant_clock();
  size_t before = count_leftovers();
  run_rows(true, false);
  run_rows(false, false);
  faults.counts.left += count_leftovers() - before;
  printf("%zu runs in %.0f s: %zu survived, %zu told, %zu hung, %zu wrong, %zu left something "
         "behind, %zu other than promised\n",
         faults.counts.runs, participant_clock() - began, faults.counts.survived,
         faults.counts.told, faults.counts.hung, faults.counts.wrong, faults.counts.left,
         faults.counts.broken);
  if (faults.counts.killed)
    printf("over tcp %zu killed ranks were noticed by all others within %.3f s\n",
           faults.counts.killed, faults.counts.noticed);
  return faults.counts.runs == 0 || faults.counts.hung || faults.counts.wrong ||
         faults.counts.left || faults.counts.broken;
}

int main(int count, char **arguments) {
  static const struct option options[] = {{"filter", 1, NULL, 'f'},      {"every", 1, NULL, 'e'},
                                          {"jobs", 1, NULL, 'j'},        {"list", 0, NULL, 'l'},
                                          {"participant", 1, NULL, 's'}, {NULL, 0, NULL, 0}};
  char timeout[16];
  bool list = false;
  faults.program = arguments[0];
  snprintf(timeout, sizeof timeout, "%g", TIMEOUT);
  setenv("ONEBIT_TIMEOUT", timeout, 1);
  for (int letter; (letter = getopt_long(count, arguments, "", options, NULL)) != -1;)
    switch (letter) {
    case 'f':
      faults.filter = optarg;
      break;
    case 'e':
      faults.every = strtoul(optarg, NULL, 10);
      break;
    case 'j':
      faults.jobs = atoi(optarg);
      break;
    case 'l':
      list = true;
      break;
    case 's':
      return participant_mpi(map_shared(optarg, false));
    default:
      return 2;
    }
  if (faults.jobs < 1 || faults.jobs > MAX_JOBS || faults.every < 1) {
    fprintf(stderr, "--jobs is 1 to %d, --every 1 or more\n", MAX_JOBS);
    return 2;
  }
  if (!list)
    return run_table();
  run_rows(true, true);
  run_rows(false, true);
  return 0;
}
