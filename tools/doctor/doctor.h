/*
 * onebit-tune --doctor: finds out whether MPI uses the network that it should use.
 *
 * Measuring and judging are separate. doctor_mpi.c measures between ranks; host.c measures this
 * host and plain TCP. Both fill in a struct doctor_facts. judge.c derives findings from the facts.
 * report.c prints the findings, with the subnets of subnets.c. judge.c, report.c and subnets.c use
 * neither MPI nor the network. */
#ifndef TOOLS_DOCTOR_H
#define TOOLS_DOCTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Sets a time limit for MPI_Init, which may hang. */
void doctor_begin(void);
/* Runs the doctor. Collective over MPI_COMM_WORLD, after MPI_Init. Returns the exit status, which
 * is the same on all ranks: 0 without findings, 1 with findings. */
int doctor_run(void);

enum {
  DOCTOR_INTERFACES = 8, /* the largest number of IPv4 interfaces, without the loopback */
  DOCTOR_SUBNETS = 4,    /* the largest number of shared subnets; further ones are ignored */
  DOCTOR_ADDRESS = 20,   /* bytes of "10.77.0.0/24" */
  DOCTOR_MAX_FINDINGS = 24
};

/* --- Facts. Rates are in Gbit/s, times in microseconds; 0: not measured. */

struct doctor_interface {
  char name[16];             /* IF_NAMESIZE */
  uint32_t address, netmask; /* of the first IPv4 address, in the host's byte order */
  int mtu, speed;            /* speed: Mbit/s, -1 if the driver does not know it */
  bool up, physical;         /* physical: not virtual; virtual ones report no real speed */
  bool half_duplex;
  uint64_t sent; /* bytes by the kernel's counter, or its increase by the bulk transfer */
};

struct doctor_host {
  char name[64], loopback[16]; /* loopback: 127.x if /etc/hosts gives it to the name, or "" */
  int ranks, cpus_online, interface_count;
  int usable; /* number of CPUs that the host's ranks may use */
  struct doctor_interface interfaces[DOCTOR_INTERFACES];
  double local_hop; /* time per hop of a message that passes round all ranks of the host */
  double others;    /* number of CPUs that other programs use while all ranks sleep */
  double stolen;    /* the part of the host's CPU time that the hypervisor took */
  int lost_periods; /* periods in which the container's CPU limit stopped ranks */
  double clock;     /* seconds by which the host's clock is ahead of host 0's */
  double tcp[DOCTOR_SUBNETS]; /* rate of plain TCP from the host's partner (number ^ 1) */
};

/* A subnet in which every host has an address. */
struct doctor_subnet {
  uint32_t network, netmask;
  double tcp; /* rate of plain TCP between the fastest pair of hosts */
};

struct doctor_facts {
  char library[64];
  int rank_count, host_count, subnet_count;
  int yields; /* whether idle ranks yield their CPU: 1, 0, or -1 for unknown */
  struct doctor_host *hosts;
  struct doctor_subnet subnets[DOCTOR_SUBNETS];
  uint64_t bulk;     /* bytes that each host sent to the next host in the bulk transfer */
  double *bandwidth; /* rate of MPI: [from * host_count + to] */
};

/* Finds the subnets in which every host has a different address. An interface such as docker0 has
 * the same address on all hosts, so it does not connect them. */
void doctor_find_subnets(struct doctor_facts *facts);
bool doctor_is_in_network(const struct doctor_interface *one, uint32_t address, uint32_t netmask);
/* Returns the host's interface in a subnet, or NULL if no such interface is up. */
const struct doctor_interface *doctor_find_interface(const struct doctor_facts *facts, int host,
                                                     int subnet);
/* Returns the fraction of a host's traffic that it sent over a subnet; with host -1, the fraction
 * of all hosts' traffic. Returns 0 if the kernel did not count the bulk transfer, as with RDMA. */
double doctor_traffic_part(const struct doctor_facts *facts, int host, int subnet);
/* Returns the subnet that carried most of the traffic, or -1 if no shared subnet carried any. */
int doctor_used_subnet(const struct doctor_facts *facts);
/* Returns the subnet in which plain TCP is fastest. */
int doctor_fastest_subnet(const struct doctor_facts *facts);
/* True if a rate is an outlier: much lower than the other rates of its kind. */
bool doctor_is_outlier(double value, const double *values, int count, double ratio);

/* --- Findings and settings */

enum { DOCTOR_SEEN = 320 };

/* The kinds of findings, in the order of the report. Causes come before consequences: first
 * processors, then interfaces, hosts, networks, and others. */
enum doctor_kind {
  DOCTOR_BUSY, /* other programs use the CPUs, so that measured times are inaccurate */
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
  bool sure; /* another measurement cannot change the finding */
  const char *why, *advice;
  int subnet; /* the only subnet that MPI should use; -1: no change of MPI's settings */
  char seen[DOCTOR_SEEN];
};

struct doctor_diagnosis {
  int count, more; /* more: number of findings that did not fit into the array */
  struct doctor_finding findings[DOCTOR_MAX_FINDINGS];
  bool has_subnet; /* a finding names the subnet that MPI should use */
};

void doctor_judge(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis);

void doctor_print_facts(FILE *file, const struct doctor_facts *facts);
void doctor_print_findings(FILE *file, const struct doctor_facts *facts,
                           const struct doctor_diagnosis *diagnosis);
/* Returns a subnet as text: "10.77.0.0/24". */
const char *doctor_format_network(uint32_t address, uint32_t netmask, char text[DOCTOR_ADDRESS]);

/* --- This machine: Linux */

/* Counters of the processors since the machine started. `busy` and `stolen` are seconds, summed
 * over all CPUs; `seconds` is the time of the reading. */
struct doctor_load {
  double busy, stolen, seconds;
  int lost_periods;
};

void doctor_read_load(struct doctor_load *load);
void doctor_read_host(struct doctor_host *host); /* reads the host's name, CPUs and interfaces */
/* Finds the first address 127.x that /etc/hosts gives to a name; "" if it gives none. */
void doctor_find_loopback(FILE *hosts, const char *name, char loopback[16]);
/* Replaces the byte counters of `after` by their increase since `before`. */
void doctor_subtract(const struct doctor_host *before, struct doctor_host *after);

/* Measure plain TCP. doctor_listen creates a socket that listens at an address, and stores its
 * port; on failure it stores 0 and returns -1. The other host then calls doctor_send, which sends
 * for some tenths of a second. doctor_receive returns the rate in Gbit/s, or 0 without a
 * connection. Both functions time out after some seconds. */
int doctor_listen(uint32_t address, uint16_t *port);
void doctor_send(uint32_t own, uint32_t address, uint16_t port);
double doctor_receive(int listener); /* closes the listener */

#endif
