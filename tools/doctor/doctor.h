/*
 * onebit-tune --doctor: whether the network that MPI uses is the one that it should use.
 *
 * Measuring and judging are apart. doctor_mpi.c measures among ranks, measure.c this host and plain
 * TCP; both fill in a struct doctor_facts. What is made of it needs neither MPI nor the machine:
 * facts.c answers questions about them, judge.c has the findings, report.c prints.
 */
#ifndef TOOLS_DOCTOR_H
#define TOOLS_DOCTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Collective over MPI_COMM_WORLD, after MPI_Init. An exit status, the same on all ranks: 0 without
 * findings, 1 with findings. */
int doctor_run(void);

enum {
  DOCTOR_NAME = 64,      /* a host's name: what Linux allows */
  DOCTOR_INTERFACES = 8, /* with an IPv4 address, the loopback left out; further ones are ignored */
  DOCTOR_SUBNETS = 4,    /* that all hosts share; further ones are ignored */
  DOCTOR_CPU_TEXT = 16,  /* 1,024 CPUs, as cpu_set_t */
  DOCTOR_RATES = 3,      /* with 1, 2 and 4 streams at once */
  DOCTOR_STREAMS = 1 << (DOCTOR_RATES - 1)
};

/* --- Facts. Rates are Gbit/s, times microseconds; 0: not measured. */

struct doctor_rank {
  int host;                       /* index into the hosts */
  int yields;                     /* the MPI library, when idle: 1 yes, 0 no, -1 it does not say */
  uint64_t cpus[DOCTOR_CPU_TEXT]; /* a bit for each that the rank may use */
};

struct doctor_interface {
  char name[16];             /* IF_NAMESIZE */
  uint32_t address, netmask; /* IPv4, in the host's byte order */
  int mtu, speed;            /* speed: Mbit/s, -1 where the driver does not know */
  bool up, physical;         /* physical: a device; the speed of virtual ones means nothing */
  uint64_t sent, packets;    /* as the kernel has counted, or what the bulk transfer added */
};

struct doctor_host {
  char name[DOCTOR_NAME];
  int ranks, cpus_online, interface_count;
  struct doctor_interface interfaces[DOCTOR_INTERFACES];
  double local_hop; /* from rank to rank of the host while a message goes round all of them */
};

/* A subnet that every host has an address in. */
struct doctor_subnet {
  uint32_t network, netmask;
  double rate[DOCTOR_RATES]; /* plain TCP, the fastest pair of hosts */
};

struct doctor_facts {
  enum { DOCTOR_OPEN_MPI, DOCTOR_MPICH, DOCTOR_OTHER_MPI } library;
  char library_name[64];
  int rank_count, host_count, subnet_count;
  struct doctor_rank *ranks;
  struct doctor_host *hosts;
  struct doctor_subnet subnets[DOCTOR_SUBNETS];
  uint64_t bulk;  /* bytes that each host sent to the next one while the counters were read */
  double hop_two; /* from host to host: two of them, the other ranks sleep */
  double hop_all; /* round all of them, the other ranks wait in MPI */
  double *bandwidth, *round_trip; /* [from * host_count + to]; round_trip is symmetric */
  int message_streams; /* pairs of ranks that sent at once in many_streams; 0: one rank a host */
  double one_stream, many_streams; /* MPI, between the first two hosts */
};

/* Fills in the subnets that every host has an address in, each host another one: docker0's address
 * is the same on all hosts, so it joins nothing. */
void doctor_find_subnets(struct doctor_facts *facts);

/* The host's interface in a subnet, NULL: none that is up. */
const struct doctor_interface *doctor_interface_in(const struct doctor_facts *facts, int host,
                                                   int subnet);

/* The interface that carried most of the bulk transfer, and its part of what all of them carried;
 * NULL when the counters did not see it, as with RDMA. */
const struct doctor_interface *doctor_carrier(const struct doctor_facts *facts, int host,
                                              double *part);

/* The part of the traffic that took the host's interface in that subnet, or all hosts' with
 * host -1. */
double doctor_part_of(const struct doctor_facts *facts, int host, int subnet);

/* The index of the subnet that carried the traffic of most hosts; -1: none. */
int doctor_used_subnet(const struct doctor_facts *facts);

int doctor_cpu_count(const uint64_t *cpus);
/* Of all CPUs that a rank of the host may use. */
int doctor_host_cpus(const struct doctor_facts *facts, int host);

/* "10.77.0.1", "10.77.0.0/24"; text has DOCTOR_ADDRESS bytes. */
enum { DOCTOR_ADDRESS = 20 };
const char *doctor_address(uint32_t address, char *text);
const char *doctor_network(const struct doctor_subnet *subnet, char *text);

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
  char seen[320], why[160], set[256]; /* set: what to do; settings come after all findings */
};

enum { DOCTOR_MAX_FINDINGS = 24 };

struct doctor_diagnosis {
  int count, more; /* further findings are counted in `more` alone */
  struct doctor_finding findings[DOCTOR_MAX_FINDINGS];
  /* What the settings are to say, from the findings. */
  bool set_yield, set_binding;
  int set_subnet;  /* index, -1: leave the interface alone */
  int set_streams; /* 0: leave them alone */
};

void doctor_judge(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis);

void doctor_print_facts(FILE *file, const struct doctor_facts *facts);
void doctor_print_findings(FILE *file, const struct doctor_diagnosis *diagnosis);
/* The lines to paste, for the MPI library at hand, UCX and NCCL; nothing without findings that ask
 * for settings. */
void doctor_print_settings(FILE *file, const struct doctor_facts *facts,
                           const struct doctor_diagnosis *diagnosis);

/* --- Statistics */

/* Whether `value` lies below (rates) or above (times) the other values of its kind by more than
 * noise: by the given ratio of the median, and by more than several median absolute deviations.
 * Zeros are left out; never among fewer than three. */
bool doctor_outlier(double value, const double *values, int count, double ratio, bool low_is_bad);

/* --- This machine: Linux */

void doctor_read_cpus(uint64_t cpus[DOCTOR_CPU_TEXT]);
void doctor_read_host(struct doctor_host *host); /* name, CPUs, interfaces with their counters */
/* Turns the counters of `after` into what was added since `before`. */
void doctor_subtract(const struct doctor_host *before, struct doctor_host *after);

/* Plain TCP. A listening socket on a free port of an address, -1: none; *port is that port. Then
 * one host sends for some tenths of a second on several connections at once from its address to
 * the other's, which receives, and gets Gbit/s, 0 when there is no connection. Each gives up after
 * some seconds. */
int doctor_listen(uint32_t address, uint16_t *port);
void doctor_send(uint32_t own, uint32_t address, uint16_t port, int streams);
double doctor_receive(int listener, int streams); /* closes the listener */

#endif
