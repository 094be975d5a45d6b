/*
 * onebit-tune --doctor: whether the network that MPI uses is the one that it should use.
 *
 * Measuring and judging are apart. What is measured goes into a struct doctor_facts (ranks and the
 * measuring that needs MPI: *_mpi.c; interfaces: host.c; plain sockets:
 * socket.c). What is made of it needs neither MPI nor the machine: findings
 * (judge.c), settings (advice.c), tables (report.c).
 */
#ifndef TOOLS_TUNE_DOCTOR_H
#define TOOLS_TUNE_DOCTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Collective over MPI_COMM_WORLD, after MPI_Init; the arguments are those after --doctor. Returns
 * an exit status, the same on all ranks: healthy; findings; the command line is wrong. */
int tune_doctor(int argc, char **argv);
enum { DOCTOR_HEALTHY = 0, DOCTOR_FINDINGS = 1, DOCTOR_USAGE = 2 };

enum {
  DOCTOR_NAME = 64,      /* a host's name: what Linux allows */
  DOCTOR_INTERFACES = 8, /* with an IPv4 address, the loopback left out; further ones are ignored */
  DOCTOR_SUBNETS = 4,    /* that all hosts share; further ones are ignored */
  DOCTOR_CPU_WORDS = 16, /* 1,024 CPUs, as cpu_set_t */
  DOCTOR_STREAMS = 3     /* 1, 2 and 4 streams at once */
};

/* --- Facts. Rates are Gbit/s, times microseconds; 0: not measured. */

struct doctor_rank {
  int host;                        /* index into the hosts */
  int yields;                      /* the MPI library, when idle: 1 yes, 0 no, -1 it does not say */
  uint64_t cpus[DOCTOR_CPU_WORDS]; /* a bit for each that the rank may use */
};

struct doctor_interface {
  char name[16];             /* IF_NAMESIZE */
  uint32_t address, netmask; /* IPv4, in the host's byte order */
  int mtu, speed;            /* speed: Mbit/s, -1 where the driver does not know */
  bool up, physical;         /* physical: a device; the speed of virtual ones means nothing */
  uint64_t sent, received; /* bytes that the kernel has counted, or that the bulk transfer added */
  uint64_t packets;        /* sent, likewise */
};

struct doctor_host {
  char name[DOCTOR_NAME];
  int ranks, cpus_online;
  int interface_count;
  struct doctor_interface interfaces[DOCTOR_INTERFACES];
  double local_hop; /* from rank to rank of the host while a message goes round all of them */
};

/* A subnet that every host has an address in. */
struct doctor_subnet {
  uint32_t network, netmask;
  double rate[DOCTOR_STREAMS]; /* plain TCP, the fastest pair of hosts; 1, 2, 4 streams */
};

enum doctor_library { DOCTOR_OPEN_MPI, DOCTOR_MPICH, DOCTOR_OTHER_MPI };

struct doctor_facts {
  enum doctor_library library;
  char library_name[64];
  int rank_count, host_count;
  struct doctor_rank *ranks;
  struct doctor_host *hosts;
  uint64_t
      bulk; /* bytes that each host sent to the next one while the kernel's counters were read */
  double hop_two, hop_all; /* from host to host: two of them, the other ranks sleep; round all of
                              them, the other ranks wait in MPI */
  double *bandwidth;       /* [from * host_count + to] */
  double *round_trip;      /* [a * host_count + b], both ways round */
  int message_streams; /* pairs of ranks that sent at once in many_streams; 0: one rank a host */
  double one_stream, many_streams; /* MPI, between the first two hosts */
  int subnet_count;
  struct doctor_subnet subnets[DOCTOR_SUBNETS];
};

/* --- Schedules, statistics and addresses (pure.c) */

/* Whom `host` meets in a round of a tournament of all against all, -1: nobody. Rounds go from 0 to
 * doctor_rounds() - 1; in each of them no host is in two pairs. */
int doctor_rounds(int hosts);
int doctor_opponent(int hosts, int round, int host);

/* Sorts the values. The median of none is 0. */
double doctor_median(double *values, int count);

/* Whether `value` lies below (rates) or above (times) the other values of its kind by more than
 * noise: by the given ratio of the median, and by more than several median absolute deviations.
 * Zeros are left out; never among fewer than three. */
bool doctor_outlier(double value, const double *values, int count, double ratio, bool low_is_bad);

/* "10.77.0.1", "10.77.0.0/24"; text has room for DOCTOR_ADDRESS bytes. */
enum { DOCTOR_ADDRESS = 20 };
const char *doctor_address(uint32_t address, char *text);
const char *doctor_network(uint32_t network, uint32_t netmask, char *text);

/* Fills the subnets that every host has an address in, each host another one: docker0's address is
 * the same on all hosts, so it joins nothing. */
void doctor_find_subnets(struct doctor_facts *facts);

/* The host's interface in that subnet, NULL: none that is up. */
const struct doctor_interface *doctor_interface_in(const struct doctor_host *host, uint32_t network,
                                                   uint32_t netmask);

/* The part of the traffic that took the host's interface in that subnet, or all hosts' with
 * host -1. */
double doctor_part_of(const struct doctor_facts *facts, int host, int subnet);

/* The interface that carried most of the bulk transfer, and its part of what all of them carried;
 * NULL when the counters did not see it, as with RDMA. */
const struct doctor_interface *doctor_carrier(const struct doctor_facts *facts, int host,
                                              double *part);

/* The index of the subnet that carried the traffic of most hosts; -1: none. */
int doctor_used_subnet(const struct doctor_facts *facts);

/* The fastest that a host sends to, or receives from, any other; 0 where nothing was measured. */
double doctor_best_rate(const struct doctor_facts *facts, int host, bool sends);
double doctor_best_round_trip(const struct doctor_facts *facts, int host);

int doctor_cpu_count(const uint64_t *cpus);
/* Of all CPUs that a rank of the host may use. */
int doctor_host_cpus(const struct doctor_facts *facts, int host);

/* --- Findings and settings */

struct doctor_finding {
  enum doctor_kind {
    DOCTOR_SPINNING,
    DOCTOR_SAME_CPU,
    DOCTOR_WRONG_INTERFACE, /* another subnet that all hosts share is faster */
    DOCTOR_ODD_INTERFACE,   /* a host's traffic takes another subnet than the others' */
    DOCTOR_SPREAD,          /* traffic takes several interfaces, of which one is slower */
    DOCTOR_SLOW_HOST,
    DOCTOR_SLOW_PAIR,
    DOCTOR_LATE_HOST,
    DOCTOR_LINK_SPEED,
    DOCTOR_STREAMS_HELP,
    DOCTOR_MTU
  } kind;
  int host;                           /* -1: all */
  char seen[320], why[256], set[256]; /* set: what to do in words; settings come after all */
};

enum { DOCTOR_MOST_FINDINGS = 24 };

struct doctor_diagnosis {
  int count; /* further findings are counted in `more` alone */
  int more;
  struct doctor_finding findings[DOCTOR_MOST_FINDINGS];
  /* What the settings are to say, from the findings. */
  bool set_yield, set_binding;
  int set_subnet;  /* index, -1: leave the interface alone */
  int set_streams; /* 0: leave them alone */
};

void doctor_judge(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis);

/* The lines to paste, for the MPI library at hand, UCX and NCCL; nothing without findings that ask
 * for settings. */
void doctor_print_settings(FILE *file, const struct doctor_facts *facts,
                           const struct doctor_diagnosis *diagnosis);
void doctor_print_findings(FILE *file, const struct doctor_diagnosis *diagnosis);
void doctor_print_facts(FILE *file, const struct doctor_facts *facts);

/* --- This machine (host.c, socket.c): Linux */

void doctor_read_cpus(uint64_t cpus[DOCTOR_CPU_WORDS]);
void doctor_read_host(struct doctor_host *host); /* name, CPUs, interfaces with their counters */
/* Turns the counters of `after` into what was added since `before`. */
void doctor_subtract(const struct doctor_host *before, struct doctor_host *after);

/* A listening socket on a free port of an address, -1: none. *port is that port. */
int doctor_listen(uint32_t address, uint16_t *port);
/* One end of `streams` connections, made within `limit` seconds: from `own` to address:port, or
 * those that come in at the listener. False, with all sockets closed, when they are not made. */
bool doctor_connect(uint32_t own, uint32_t address, uint16_t port, int streams, double limit,
                    int *sockets);
bool doctor_accept(int listener, int streams, double limit, int *sockets);
/* Sends on all streams for so many seconds, then says so by closing; or receives until all of them
 * are closed. Receiving gives Gbit/s, 0 on failure; both close the sockets. */
void doctor_send_for(double seconds, int streams, int *sockets);
double doctor_receive_all(double limit, int streams, int *sockets);

double doctor_now(void); /* seconds */

#endif
