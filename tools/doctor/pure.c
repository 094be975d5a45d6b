/* The doctor's schedules, statistics and addresses: nothing here knows MPI or this machine. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/doctor/doctor.h"

/* --- Schedule ----------------------------------------------------------------------------------*/

int doctor_rounds(int hosts) { return hosts < 2 ? 0 : hosts - 1 + hosts % 2; }

/* The circle method: the last of an even number stays, the others go round and meet the one
 * opposite. An odd number gets a last one that is nobody. */
int doctor_opponent(int hosts, int round, int host) {
  int circle = doctor_rounds(hosts);
  int opponent;
  if (host == circle)
    opponent = (round * ((circle + 1) / 2)) % circle;
  else {
    opponent = ((round - host) % circle + circle) % circle;
    if (opponent == host) /* it would meet itself: 2 * host = round, modulo the circle */
      opponent = circle;
  }
  return opponent < hosts ? opponent : -1;
}

/* --- Statistics --------------------------------------------------------------------------------*/

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

double doctor_median(double *values, int count) {
  if (count < 1)
    return 0;
  qsort(values, (size_t)count, sizeof *values, ascending);
  return (values[(count - 1) / 2] + values[count / 2]) / 2;
}

/* A normal distribution's standard deviation is 1.4826 median absolute deviations; four of them are
 * beyond noise for any number of hosts that a table shows. */
#define NOISE (4 * 1.4826)

/* The better one of two values in the middle: when half of the hosts are slow, they are what is
 * wrong, and when two numbers differ, the spread of the good half is what noise is. */
static double good_median(double *values, int count, bool low_is_bad) {
  qsort(values, (size_t)count, sizeof *values, ascending);
  return values[low_is_bad ? count / 2 : (count - 1) / 2];
}

bool doctor_outlier(double value, const double *values, int count, double ratio, bool low_is_bad) {
  double *copy = malloc((size_t)(count > 0 ? count : 1) * sizeof *copy);
  int used = 0;
  bool far = false;
  for (int i = 0; copy && i < count; i++)
    if (values[i] > 0)
      copy[used++] = values[i];
  if (used >= 3 && value > 0) {
    double median = good_median(copy, used, low_is_bad);
    for (int i = 0; i < used; i++)
      copy[i] = fabs(copy[i] - median);
    double noise = NOISE * good_median(copy, used, false);
    far = low_is_bad ? value * ratio <= median && median - value > noise
                     : value >= median * ratio && value - median > noise;
  }
  free(copy);
  return far;
}

/* A host's best: noise and a partner's faults only make rates less and times longer. */
double doctor_best_rate(const struct doctor_facts *facts, int host, bool sends) {
  double best = 0;
  for (int other = 0; other < facts->host_count; other++) {
    int from = sends ? host : other, to = sends ? other : host;
    best = fmax(best, facts->bandwidth[from * facts->host_count + to]);
  }
  return best;
}

double doctor_best_round_trip(const struct doctor_facts *facts, int host) {
  double best = 0;
  for (int other = 0; other < facts->host_count; other++) {
    double time = facts->round_trip[host * facts->host_count + other];
    if (time > 0 && (best <= 0 || time < best))
      best = time;
  }
  return best;
}

/* --- Addresses ---------------------------------------------------------------------------------*/

const char *doctor_address(uint32_t address, char *text) {
  snprintf(text, DOCTOR_ADDRESS, "%u.%u.%u.%u", address >> 24, address >> 16 & 255,
           address >> 8 & 255, address & 255);
  return text;
}

const char *doctor_network(uint32_t network, uint32_t netmask, char *text) {
  char address[DOCTOR_ADDRESS];
  snprintf(text, DOCTOR_ADDRESS, "%.15s/%d", doctor_address(network, address),
           __builtin_popcount(netmask));
  return text;
}

const struct doctor_interface *doctor_interface_in(const struct doctor_host *host, uint32_t network,
                                                   uint32_t netmask) {
  for (int i = 0; i < host->interface_count; i++) {
    const struct doctor_interface *interface = &host->interfaces[i];
    if (interface->up && interface->netmask == netmask && (interface->address & netmask) == network)
      return interface;
  }
  return NULL;
}

static bool is_shared(const struct doctor_facts *facts, uint32_t network, uint32_t netmask) {
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *mine = doctor_interface_in(&facts->hosts[h], network, netmask);
    if (!mine)
      return false;
    for (int other = 0; other < h; other++)
      if (doctor_interface_in(&facts->hosts[other], network, netmask)->address == mine->address)
        return false;
  }
  return true;
}

void doctor_find_subnets(struct doctor_facts *facts) {
  facts->subnet_count = 0;
  for (int i = 0; i < facts->hosts[0].interface_count; i++) {
    const struct doctor_interface *interface = &facts->hosts[0].interfaces[i];
    uint32_t network = interface->address & interface->netmask;
    bool known = false;
    for (int s = 0; s < facts->subnet_count; s++)
      known |=
          facts->subnets[s].network == network && facts->subnets[s].netmask == interface->netmask;
    if (known || facts->subnet_count == DOCTOR_SUBNETS ||
        !is_shared(facts, network, interface->netmask))
      continue;
    facts->subnets[facts->subnet_count++] =
        (struct doctor_subnet){.network = network, .netmask = interface->netmask};
  }
}

/* --- What carried the traffic ------------------------------------------------------------------*/

/* Counters are one an interface: a second address of the same interface has them again. */
static bool counted_before(const struct doctor_host *host, int interface) {
  for (int i = 0; i < interface; i++)
    if (strcmp(host->interfaces[i].name, host->interfaces[interface].name) == 0)
      return true;
  return false;
}

const struct doctor_interface *doctor_carrier(const struct doctor_facts *facts, int host,
                                              double *part) {
  const struct doctor_host *the = &facts->hosts[host];
  const struct doctor_interface *most = NULL;
  uint64_t all = 0;
  for (int i = 0; i < the->interface_count; i++) {
    const struct doctor_interface *interface = &the->interfaces[i];
    if (counted_before(the, i))
      continue;
    all += interface->sent;
    if (!most || interface->sent > most->sent)
      most = interface;
  }
  if (!most || facts->bulk == 0 || all < facts->bulk / 2) /* what else is sent is a trickle */
    return NULL;
  *part = (double)most->sent / (double)all;
  return most;
}

double doctor_part_of(const struct doctor_facts *facts, int host, int subnet) {
  double there = 0, all = 0;
  for (int h = 0; h < facts->host_count; h++) {
    double part;
    const struct doctor_interface *carrier = doctor_carrier(facts, h, &part);
    const struct doctor_interface *interface = doctor_interface_in(
        &facts->hosts[h], facts->subnets[subnet].network, facts->subnets[subnet].netmask);
    if (!carrier || (host >= 0 && host != h))
      continue;
    there += interface ? (double)interface->sent : 0;
    all += (double)carrier->sent / part;
  }
  return all > 0 ? there / all : 0;
}

int doctor_used_subnet(const struct doctor_facts *facts) {
  int best = -1, most = 0;
  for (int s = 0; s < facts->subnet_count; s++) {
    const struct doctor_subnet *subnet = &facts->subnets[s];
    int hosts = 0;
    for (int h = 0; h < facts->host_count; h++) {
      double part;
      const struct doctor_interface *carrier = doctor_carrier(facts, h, &part);
      const struct doctor_interface *there =
          doctor_interface_in(&facts->hosts[h], subnet->network, subnet->netmask);
      hosts += carrier && there && strcmp(carrier->name, there->name) == 0;
    }
    if (hosts > most) {
      most = hosts;
      best = s;
    }
  }
  return best;
}

/* --- CPUs --------------------------------------------------------------------------------------*/

int doctor_cpu_count(const uint64_t *cpus) {
  int count = 0;
  for (int word = 0; word < DOCTOR_CPU_WORDS; word++)
    count += __builtin_popcountll(cpus[word]);
  return count;
}

int doctor_host_cpus(const struct doctor_facts *facts, int host) {
  uint64_t all[DOCTOR_CPU_WORDS] = {0};
  for (int r = 0; r < facts->rank_count; r++)
    for (int word = 0; facts->ranks[r].host == host && word < DOCTOR_CPU_WORDS; word++)
      all[word] |= facts->ranks[r].cpus[word];
  return doctor_cpu_count(all);
}
