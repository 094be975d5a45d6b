/*
 * onebit-tune --doctor: finds out whether MPI uses the network that it should use.
 *
 * Measuring and judging are separate. doctor_mpi.c measures between ranks, host.c measures this
 * host and plain TCP; they fill in a struct doctor_facts. judge.c derives findings from it, and
 * report.c prints them, with the subnets of subnets.c; these need neither MPI nor the machine.
 */
#ifndef TOOLS_DOCTOR_H
#define TOOLS_DOCTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Sets a time limit for MPI_Init, which may hang. */
void doctor_begin(void);
/* Runs the doctor. Collective over MPI_COMM_WORLD, after MPI_Init. Returns the exit status, the
 * same on all ranks: 0 without findings, 1 with findings. */
int doctor_run(void);

enum {
  DOCTOR_INTERFACES = 8, /* interfaces with an IPv4 address, but the loopback; others are ignored */
  DOCTOR_SUBNETS = 4,    /* subnets that all hosts share; further ones are ignored */
  DOCTOR_ADDRESS = 20,   /* bytes of "10.77.0.0/24" */
  DOCTOR_MAX_FINDINGS = 24
};

/* --- Facts. Rates are Gbit/s, times microseconds; 0: not measured. */

struct doctor_interface {
  char name[16];             /* IF_NAMESIZE */
  uint32_t address, netmask; /* the first IPv4 address, in the host's byte order */
  int mtu, speed;            /* speed: Mbit/s, -1 where the driver does not know */
  bool up, physical;         /* physical: a device; the speed of virtual ones means nothing */
  bool half_duplex;
  uint64_t sent; /* bytes by the kernel's counter, or what the bulk transfer added */
};

struct doctor_host {
  char name[64], loopback[16]; /* the address 127.x to which /etc/hosts maps its name, or "" */
  int ranks, cpus_online, interface_count;
  int usable; /* CPUs that its ranks may use */
  struct doctor_interface interfaces[DOCTOR_INTERFACES];
  double local_hop; /* time between ranks of the host while a message goes around all of them */
  double others;    /* CPUs that other programs use while the doctor's ranks sleep */
  double stolen;    /* the part of its CPUs' time that the hypervisor took */
  int lost_periods; /* periods in which its container's CPU limit stopped ranks */
  double clock;     /* seconds that it is ahead of host 0 */
  double tcp[DOCTOR_SUBNETS]; /* rate of plain TCP from host number ^ 1 */
};

/* A subnet in which every host has an address. */
struct doctor_subnet {
  uint32_t network, netmask;
  double tcp; /* plain TCP, between the fastest pair of hosts */
};

struct doctor_facts {
  char library[64];
  int rank_count, host_count, subnet_count;
  int yields; /* whether idle ranks give their CPU away: 1, 0, or -1 for unknown */
  struct doctor_host *hosts;
  struct doctor_subnet subnets[DOCTOR_SUBNETS];
  uint64_t bulk;     /* bytes that each host sent to the next one while the counters were read */
  double *bandwidth; /* [from * host_count + to] */
};

/* Finds the subnets in which every host has an address of its own. docker0 has the same address on
 * all hosts, so it connects no hosts. */
void doctor_find_subnets(struct doctor_facts *facts);
bool doctor_is_in_network(const struct doctor_interface *one, uint32_t address, uint32_t netmask);
/* Returns the host's interface in a subnet; NULL: none is up. */
const struct doctor_interface *doctor_find_interface(const struct doctor_facts *facts, int host,
                                                     int subnet);
/* Returns the part of the traffic that a host sent over a subnet, or with host -1 all hosts; 0 if
 * the counters did not include the bulk transfer, as with RDMA. */
double doctor_traffic_part(const struct doctor_facts *facts, int host, int subnet);
/* Returns the subnet that carried most of the traffic; -1: none. */
int doctor_used_subnet(const struct doctor_facts *facts);
/* Returns the subnet in which plain TCP is fastest. */
int doctor_fastest_subnet(const struct doctor_facts *facts);
/* True if a rate is an outlier below the others of its kind. */
bool doctor_is_outlier(double value, const double *values, int count, double ratio);

/* --- Findings and settings */

enum { DOCTOR_SEEN = 320 };

/* The kinds of findings, in the order of causes: processors, interfaces, hosts, networks, and
 * others. */
enum doctor_kind {
  DOCTOR_BUSY, /* makes measured times inaccurate */
  DOCTOR_STOLEN,
  DOCTOR_SPINNING,
  DOCTOR_SAME_CPU,
  DOCTOR_DOWN,
  DOCTOR_DUPLEX,
  DOCTOR_NEGOTIATED,
  DOCTOR_SLOW_HOST,
  DOCTOR_SLOW_PAIR,
  DOCTOR_WRONG_INTERFACE,
  DOCTOR_MTU,
  DOCTOR_ODD_INTERFACE,
  DOCTOR_MPI_SLOW,
  DOCTOR_FIREWALL,
  DOCTOR_LINK_SPEED,
  DOCTOR_BRIDGE,
  DOCTOR_LOOPBACK_NAME,
  DOCTOR_CLOCK,
  DOCTOR_KINDS
};

struct doctor_finding {
  enum doctor_kind kind;
  int host;  /* -1: all */
  bool sure; /* measuring again cannot change it */
  const char *why, *advice;
  int subnet; /* the one to use alone; -1: leave the interface as it is */
  char seen[DOCTOR_SEEN];
};

struct doctor_diagnosis {
  int count, more; /* findings; those beyond the room are counted in `more` alone */
  struct doctor_finding findings[DOCTOR_MAX_FINDINGS];
  bool has_subnet; /* a finding names the subnet to use */
};

void doctor_judge(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis);

void doctor_print_facts(FILE *file, const struct doctor_facts *facts);
void doctor_print_findings(FILE *file, const struct doctor_facts *facts,
                           const struct doctor_diagnosis *diagnosis);
/* Returns a subnet as text: "10.77.0.0/24". */
const char *doctor_format_network(uint32_t address, uint32_t netmask, char text[DOCTOR_ADDRESS]);

/* --- This machine: Linux */

/* Counters of the processors since the machine started: seconds of all CPUs together. */
struct doctor_load {
  double busy, stolen, seconds;
  int lost_periods;
};

void doctor_read_load(struct doctor_load *load);
void doctor_read_host(struct doctor_host *host); /* name, CPUs, interfaces with their counters */
/* Finds the first address 127.x that a line of /etc/hosts gives a name; "": none. */
void doctor_find_loopback(FILE *hosts, const char *name, char loopback[16]);
/* Replaces the counters of `after` by their increase since `before`. */
void doctor_subtract(const struct doctor_host *before, struct doctor_host *after);

/* Measure plain TCP. doctor_listen creates a listening socket at an address, on a free port *port;
 * -1: it can not. doctor_send then sends from one host to the other for some tenths of a second;
 * doctor_receive returns the rate in Gbit/s, 0 without a connection. Both give up after some
 * seconds. */
int doctor_listen(uint32_t address, uint16_t *port);
void doctor_send(uint32_t own, uint32_t address, uint16_t port);
double doctor_receive(int listener); /* closes the listener */

#endif
