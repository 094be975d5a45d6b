/* onebit-tune --doctor: measures, judges, measures again what looks wrong, and says what it is. */
#define _POSIX_C_SOURCE 200809L
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/doctor/mpi.h"

static const char help[] =
    "Usage: onebit-tune --doctor [--help]\n"
    "\n"
    "Under mpirun or srun, the same way as the program in question: finds out in half a minute\n"
    "which interface MPI's traffic takes, whether another one is faster, which hosts are slow,\n"
    "whether ranks that wait starve those that work, and prints the settings that help.\n"
    "\n"
    "Exit status: 0 without findings, 1 with findings, 2 for a wrong command line.\n";

/* --- A hang is a finding, too ------------------------------------------------------------------*/

/* Longer than any step takes in a network of 10 Mbit/s. */
enum { STEP_LIMIT = 60 };

static const char *volatile step_name;

static void write_text(const char *text) {
  if (write(STDERR_FILENO, text, strlen(text)) < 0)
    _exit(DOCTOR_FINDINGS);
}

static void give_up(int signal_number) {
  (void)signal_number;
  write_text("onebit-tune: doctor: nothing moves for a minute while measuring ");
  write_text(step_name);
  write_text(
      ": a firewall between the hosts, an interface that\nnot all hosts can reach, or an MTU "
      "that the way between them does not carry\n");
  _exit(DOCTOR_FINDINGS);
}

static void begin_step(const char *name) {
  step_name = name;
  alarm(name ? STEP_LIMIT : 0);
}

/* --- All of it ---------------------------------------------------------------------------------*/

static const struct {
  const char *name;
  void (*measure)(const struct doctor_team *team, struct doctor_facts *facts);
} steps[] = {{"which interface carries the traffic", doctor_measure_carrier},
             {"how ranks wait", doctor_measure_waiting},
             {"pairs of hosts", doctor_measure_pairs},
             {"several ranks at once", doctor_measure_streams},
             {"plain TCP", doctor_measure_subnets}};

/* What looks wrong is measured again: noise that makes a rate small once does not do so always, and
 * the facts keep the best. */
enum { ATTEMPTS = 3 };
#define LONG_ENOUGH 12.0 /* seconds: an attempt more ends within the half minute */

static void examine(const struct doctor_team *team, struct doctor_facts *facts,
                    struct doctor_diagnosis *diagnosis) {
  double start = doctor_now();
  int again = 1;
  for (int attempt = 0; attempt < ATTEMPTS && again; attempt++) {
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
      begin_step(steps[i].name);
      steps[i].measure(team, facts);
    }
    if (team->rank == 0)
      doctor_judge(facts, diagnosis);
    again = diagnosis->count > 0 && doctor_now() - start < LONG_ENOUGH;
    MPI_Bcast(&again, 1, MPI_INT, 0, team->all);
  }
  begin_step(NULL);
}

static int run(const struct doctor_team *team) {
  static struct doctor_diagnosis diagnosis;
  struct doctor_facts facts;
  int status = DOCTOR_FINDINGS;
  begin_step("who is where");
  if (doctor_gather(team, &facts)) {
    examine(team, &facts, &diagnosis);
    status = diagnosis.count > 0 ? DOCTOR_FINDINGS : DOCTOR_HEALTHY;
    if (team->rank == 0) {
      doctor_print_facts(stdout, &facts);
      doctor_print_findings(stdout, &diagnosis);
      doctor_print_settings(stdout, &facts, &diagnosis);
      fflush(stdout);
    }
    MPI_Bcast(&status, 1, MPI_INT, 0, team->all);
  } else if (team->rank == 0)
    fprintf(stderr, "onebit-tune: doctor: out of memory\n");
  doctor_facts_destroy(&facts);
  return status;
}

int tune_doctor(int argc, char **argv) {
  struct doctor_team team = {.leaders = MPI_COMM_NULL};
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (argc > 0) {
    bool asks = argc == 1 && strcmp(argv[0], "--help") == 0;
    if (rank == 0 && asks)
      fputs(help, stdout);
    else if (rank == 0)
      fprintf(stderr, "onebit-tune: --doctor %s: takes no argument but --help\n", argv[0]);
    return asks ? DOCTOR_HEALTHY : DOCTOR_USAGE;
  }
  signal(SIGALRM, give_up);
  doctor_team_create(&team);
  int status = run(&team);
  doctor_team_destroy(&team);
  return status;
}
