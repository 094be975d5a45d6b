/* onebit-tune --doctor: measures the hosts and the network, judges the results, repeats suspicious
 * measurements, and prints the report. One rank of each host, its leader, measures between hosts.
 * The first leader has the results. */
#define _GNU_SOURCE /* sched_getaffinity */
#include <math.h>
#include <mpi.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/process.h"
#include "tools/doctor/doctor.h"
#include "tools/tune/run_mpi.h"

enum { FINDINGS = 1, TAG = 1 };

static struct tune_cluster team;
static struct doctor_facts facts;
static struct doctor_load first_load; /* the load when the doctor began */

static bool is_leader(void) { return team.leaders != MPI_COMM_NULL; }

/* Keep the best of repeated measurements, since noise only makes a result worse. */
static void keep_higher_rate(double *rate, double another) { *rate = fmax(*rate, another); }
static void keep_shorter_time(double *time, double another) {
  if (another > 0 && (*time <= 0 || another < *time))
    *time = another;
}

static void *doctor_allocate(size_t count, size_t bytes) {
  void *memory = calloc(count, bytes);
  if (!memory) {
    fprintf(stderr, "onebit-tune: doctor: out of memory\n");
    MPI_Abort(MPI_COMM_WORLD, FINDINGS);
  }
  return memory;
}

/* --- The cluster -------------------------------------------------------------------------------*/

/* Returns 1 if idle ranks yield their CPU, 0 if not. Open MPI has a _Bool variable that says so;
 * without this variable the result is -1. */
static int read_yield_setting(void) {
  int provided, index, count, result = -1;
  MPI_T_cvar_handle handle;
  _Bool value[16]; /* larger than one _Bool, in case MPI writes more bytes */
  if (MPI_T_init_thread(MPI_THREAD_SINGLE, &provided) != MPI_SUCCESS)
    return -1;
  if (MPI_T_cvar_get_index("mpi_yield_when_idle", &index) == MPI_SUCCESS &&
      MPI_T_cvar_handle_alloc(index, NULL, &handle, &count) == MPI_SUCCESS) {
    if (count == 1 && MPI_T_cvar_read(handle, value) == MPI_SUCCESS)
      result = value[0];
    MPI_T_cvar_handle_free(&handle);
  }
  MPI_T_finalize();
  return result;
}

static void read_library_name(void) {
  char name[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  MPI_Get_library_version(name, &length);
  name[strcspn(name, ",\n")] = '\0'; /* some libraries add text about how they were built */
  snprintf(facts.library, sizeof facts.library, "%.63s", name);
}

/* Returns the number of CPUs that the ranks of this host may use together, or 0 if the host has
 * more CPUs than a cpu_set_t can hold. */
static int count_usable_cpus(void) {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  MPI_Allreduce(MPI_IN_PLACE, &set, sizeof set, MPI_BYTE, MPI_BOR, team.local);
  return CPU_COUNT(&set);
}

static void gather_hosts(void) {
  struct doctor_host host;
  int hosts = facts.host_count = team.hosts;
  facts.rank_count = team.size;
  facts.yields = read_yield_setting(); /* the launcher gives all ranks the same setting */
  facts.hosts = doctor_allocate((size_t)hosts, sizeof *facts.hosts);
  facts.bandwidth = doctor_allocate((size_t)hosts * (size_t)hosts, sizeof *facts.bandwidth);
  read_library_name();
  doctor_read_host(&host);
  host.ranks = team.local_size;
  host.usable = count_usable_cpus();
  host.others = NAN;
  doctor_read_load(&first_load);
  doctor_subtract(&host, &host); /* sets the byte counters to 0: nothing has been transferred yet */
  if (is_leader())
    MPI_Allgather(&host, sizeof host, MPI_BYTE, facts.hosts, sizeof host, MPI_BYTE, team.leaders);
  MPI_Bcast(facts.hosts, hosts * (int)sizeof host, MPI_BYTE, 0, team.local);
  doctor_find_subnets(&facts);
}

/* --- Processors and clocks ---------------------------------------------------------------------*/

/* Measures the CPUs that other programs use while all ranks sleep, and the time that the hypervisor
 * has taken since the doctor began. */
static void measure_load(void) {
  const struct timespec nap = {.tv_nsec = 300000000};
  struct doctor_load before, after;
  tune_wait_asleep(team.all);
  if (is_leader()) {
    struct doctor_host *own = &facts.hosts[team.host];
    doctor_read_load(&before);
    nanosleep(&nap, NULL);
    doctor_read_load(&after);
    own->others = fmin(own->others, (after.busy - before.busy) / (after.seconds - before.seconds));
    own->stolen = (after.stolen - first_load.stolen) /
                  (own->cpus_online * (after.seconds - first_load.seconds));
    own->lost_periods = after.lost_periods - first_load.lost_periods;
  }
  tune_wait_asleep(team.all);
}

static double read_clock(void) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Compares each leader's clock with the first leader's clock. The two clocks are read within
 * milliseconds of each other. */
static void measure_clocks(void) {
  for (int h = 1; is_leader() && h < facts.host_count; h++) {
    double start = read_clock(), theirs;
    if (team.host != 0 && team.host != h)
      continue;
    MPI_Sendrecv(&start, 1, MPI_DOUBLE, h - team.host, TAG, &theirs, 1, MPI_DOUBLE, h - team.host,
                 TAG, team.leaders, MPI_STATUS_IGNORE);
    facts.hosts[team.host].clock = team.host ? start - theirs : 0;
  }
  tune_wait_asleep(team.all);
}

/* Passes a message round the ranks of a host for a quarter of a second. The scheduler's time slices
 * take some milliseconds, so this time contains many whole slices. All ranks of a host take part.
 * If only two ranks did, they might run at the same time for one slice, and make thousands of quick
 * round trips. In the mean, these would hide the slices in which the two ranks wait for a CPU. */
static void measure_local_hops(void) {
  double median, hop = 0;
  const int rank = team.local_rank, size = team.local_size;
  tune_wait_asleep(team.all);
  if (size > 1)
    hop = tune_pass_round(team.local, (rank + 1) % size, (rank + size - 1) % size, rank == 0, 0.25,
                          &median) /
          size;
  tune_wait_asleep(team.all);
  if (is_leader())
    keep_shorter_time(&facts.hosts[team.host].local_hop, hop);
}

/* --- The transport that MPI uses ---------------------------------------------------------------*/

/* The bulk transfer sends 4 MiB, far more than all other traffic. At 100 Mbit/s it takes 0.35 s. */
enum { BYTES = 256 << 10, BULK_PIECES = 16 };

static void send_round_ring(int pieces) {
  static char out[BYTES], in[BYTES];
  int hosts = facts.host_count;
  for (int i = 0; i < pieces; i++)
    MPI_Sendrecv(out, BYTES, MPI_BYTE, (team.host + 1) % hosts, TAG, in, BYTES, MPI_BYTE,
                 (team.host + hosts - 1) % hosts, TAG, team.leaders, MPI_STATUS_IGNORE);
  tune_wait_asleep(team.leaders);
}

static void measure_carrier(void) {
  const struct timespec settle = {.tv_nsec = 20000000}; /* some drivers update counters late */
  if (is_leader() && facts.host_count >= 2) {
    struct doctor_host before, after, *own = &facts.hosts[team.host];
    send_round_ring(1); /* MPI connects two ranks at their first message */
    doctor_read_host(&before);
    send_round_ring(BULK_PIECES);
    nanosleep(&settle, NULL);
    doctor_read_host(&after);
    doctor_subtract(&before, &after);
    own->interface_count = after.interface_count;
    memcpy(own->interfaces, after.interfaces, sizeof own->interfaces);
    facts.bulk = (uint64_t)BULK_PIECES * BYTES;
  }
  tune_wait_asleep(team.all);
}

/* --- All pairs of hosts ------------------------------------------------------------------------*/

#define BANDWIDTH_SECONDS 0.15
/* The largest number of rounds of pairs. At 0.35 s each, 16 rounds take five seconds. In a cluster
 * of more hosts, each host is measured with at most 16 other hosts. */
enum { MAX_ROUNDS = 16 };

/* Measures the rate of a stream of messages in Gbit/s, by the receiver's clock. The first byte of a
 * message is 0 only in the last message. */
static double measure_stream(int peer, bool sends) {
  static char piece[BYTES];
  double start = ob_seconds(), bytes = 0;
  for (piece[0] = 1; piece[0]; bytes += BYTES)
    if (sends) {
      piece[0] = ob_seconds() - start < BANDWIDTH_SECONDS;
      MPI_Send(piece, BYTES, MPI_BYTE, peer, TAG, team.leaders);
    } else
      MPI_Recv(piece, BYTES, MPI_BYTE, peer, TAG, team.leaders, MPI_STATUS_IGNORE);
  double rate = 8e-9 * bytes / (ob_seconds() - start);
  if (sends)
    MPI_Recv(&rate, 1, MPI_DOUBLE, peer, TAG, team.leaders, MPI_STATUS_IGNORE);
  else
    MPI_Send(&rate, 1, MPI_DOUBLE, peer, TAG, team.leaders);
  return rate;
}

/* Measures pairs of hosts. In round r, two hosts are a pair if the sum of their numbers is r,
 * modulo the number of hosts. Therefore any two hosts are a pair in exactly one round. */
static void measure_pairs(void) {
  const int hosts = facts.host_count, host = team.host;
  double *row = facts.bandwidth + host * hosts;
  for (int round = 0; is_leader() && hosts >= 2 && round < hosts && round < MAX_ROUNDS; round++) {
    const int peer = (round - host + hosts) % hosts;
    MPI_Sendrecv(NULL, 0, MPI_BYTE, peer, TAG, NULL, 0, MPI_BYTE, peer, TAG, team.leaders,
                 MPI_STATUS_IGNORE); /* MPI connects two ranks at their first message */
    for (int turn = 0; peer != host && turn < 2; turn++) {
      const bool sends = (host < peer) == (turn == 0);
      const double rate = measure_stream(peer, sends);
      keep_higher_rate(&row[peer], sends ? rate : 0);
    }
    tune_wait_asleep(team.leaders);
  }
  if (is_leader())
    MPI_Gather(host == 0 ? MPI_IN_PLACE : row, hosts, MPI_DOUBLE, facts.bandwidth, hosts,
               MPI_DOUBLE, 0, team.leaders);
  tune_wait_asleep(team.all);
}

/* --- Plain TCP ---------------------------------------------------------------------------------*/

/* Measures the rate between two hosts with sockets. Returns the rate on the receiver, and 0 on the
 * sender or if the connection fails. */
static double measure_tcp(int subnet, int peer) {
  uint32_t own = doctor_find_interface(&facts, team.host, subnet)->address;
  uint16_t port = 0;
  if (team.host < peer) {
    MPI_Recv(&port, 1, MPI_UINT16_T, peer, TAG, team.leaders, MPI_STATUS_IGNORE);
    if (port)
      doctor_send(own, doctor_find_interface(&facts, peer, subnet)->address, port);
    return 0;
  }
  int listener = doctor_listen(own, &port);
  MPI_Send(&port, 1, MPI_UINT16_T, peer, TAG, team.leaders);
  return port ? doctor_receive(listener) : 0;
}

static void measure_subnets(void) {
  const int peer = team.host ^ 1,
            count = is_leader() && facts.host_count > 1 ? facts.subnet_count : 0;
  for (int s = 0; s < count; s++) {
    double rate = peer < facts.host_count ? measure_tcp(s, peer) : 0;
    tune_wait_asleep(team.leaders);
    keep_higher_rate(&facts.hosts[team.host].tcp[s], rate);
    MPI_Allreduce(MPI_IN_PLACE, &rate, 1, MPI_DOUBLE, MPI_MAX, team.leaders);
    keep_higher_rate(&facts.subnets[s].tcp, rate);
  }
  tune_wait_asleep(team.all);
}

/* --- A hang is a finding, too ------------------------------------------------------------------*/

enum { STEP_LIMIT = 60 }; /* seconds: longer than any step takes at 10 Mbit/s */

static const char *volatile step_name;

static void report_stall(int signal_number) {
  static const char *const text[] = {
      "onebit-tune: doctor: no progress for a minute in this step: ", NULL,
      ". Possible causes: a firewall between the hosts, an interface that\nnot all hosts can "
      "reach, or an MTU that the path between them does not carry\n"};
  (void)signal_number;
  for (int i = 0; i < 3; i++) {
    const char *part = text[i] ? text[i] : step_name;
    if (write(STDERR_FILENO, part, strlen(part)) < 0)
      break;
  }
  _exit(FINDINGS);
}

static void begin_step(const char *name) {
  step_name = name;
  alarm(name ? STEP_LIMIT : 0);
}

void doctor_begin(void) {
  signal(SIGALRM, report_stall);
  begin_step("start of MPI (MPI_Init)");
}

/* --- The whole run -----------------------------------------------------------------------------*/

static const struct {
  const char *name;
  void (*measure)(void);
} steps[] = {{"which interface carries the traffic", measure_carrier},
             {"the load of hosts", measure_load},
             {"clocks", measure_clocks},
             {"how ranks wait", measure_local_hops},
             {"pairs of hosts", measure_pairs},
             {"plain TCP", measure_subnets}};

/* The number of attempts, if measurements are suspicious. Noise may lower a rate in one attempt,
 * but rarely in all of them. */
enum { ATTEMPTS = 3 };
#define LONG_ENOUGH 12.0 /* seconds after which no attempt begins, to end within half a minute */

static bool is_doubtful(const struct doctor_diagnosis *diagnosis) {
  for (int i = 0; i < diagnosis->count; i++)
    if (!diagnosis->findings[i].sure)
      return true;
  return false;
}

int doctor_run(void) {
  static struct doctor_diagnosis diagnosis;
  double start = ob_seconds();
  int again = 1, status;
  begin_step("hosts of the ranks");
  tune_cluster_find(&team);
  gather_hosts();
  for (int attempt = 0; attempt < ATTEMPTS && again; attempt++) {
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
      begin_step(steps[i].name);
      steps[i].measure();
    }
    if (is_leader())
      MPI_Allgather(MPI_IN_PLACE, 0, MPI_BYTE, facts.hosts, sizeof *facts.hosts, MPI_BYTE,
                    team.leaders);
    if (team.rank == 0)
      doctor_judge(&facts, &diagnosis);
    again = is_doubtful(&diagnosis) && ob_seconds() - start < LONG_ENOUGH;
    MPI_Bcast(&again, 1, MPI_INT, 0, team.all);
  }
  begin_step(NULL);
  if (team.rank == 0) {
    doctor_print_facts(stdout, &facts);
    doctor_print_findings(stdout, &facts, &diagnosis);
    fflush(stdout);
  }
  status = diagnosis.count > 0 ? FINDINGS : 0;
  MPI_Bcast(&status, 1, MPI_INT, 0, team.all);
  tune_cluster_free(&team);
  free(facts.hosts);
  free(facts.bandwidth);
  return status;
}
