/* What the doctor's facts say: which interface carried the traffic, what lies beyond noise. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/doctor/doctor.h"
#include "tools/median.h"

/* --- Statistics --------------------------------------------------------------------------------*/

/* A normal distribution's standard deviation is 1.4826 median absolute deviations; four of them are
 * beyond noise for any number of hosts that a table shows. */
#define NOISE (4 * 1.4826)

/* The better one of two values in the middle: when half of the hosts are slow, they are what is
 * wrong, and when two numbers differ, the spread of the good half is what noise is. */
static double good_median(double *values, int count, bool low_is_bad) {
  tool_median(values, count); /* sorts them */
  return values[low_is_bad ? count / 2 : (count - 1) / 2];
}

bool doctor_outlier(double value, const double *values, int count, double ratio, bool low_is_bad) {
  double *copy = malloc((size_t)(count + 1) * sizeof *copy);
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

/* --- Interfaces and subnets --------------------------------------------------------------------*/

const struct doctor_interface *doctor_interface_in(const struct doctor_facts *facts, int host,
                                                   int subnet) {
  const struct doctor_host *the = &facts->hosts[host];
  const struct doctor_subnet *in = &facts->subnets[subnet];
  for (const struct doctor_interface *one = the->interfaces;
       one < the->interfaces + the->interface_count; one++)
    if (one->up && one->netmask == in->netmask && (one->address & in->netmask) == in->network)
      return one;
  return NULL;
}

/* The subnet behind the ones that count is a candidate: whether every host is in it, with an
 * address of its own, and no subnet before is the same. */
static bool is_shared(const struct doctor_facts *facts, int candidate) {
  const struct doctor_subnet *subnet = &facts->subnets[candidate];
  for (int s = 0; s < candidate; s++)
    if (facts->subnets[s].network == subnet->network &&
        facts->subnets[s].netmask == subnet->netmask)
      return false;
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *mine = doctor_interface_in(facts, h, candidate);
    if (!mine)
      return false;
    for (int other = 0; other < h; other++)
      if (doctor_interface_in(facts, other, candidate)->address == mine->address)
        return false;
  }
  return true;
}

void doctor_find_subnets(struct doctor_facts *facts) {
  const struct doctor_host *first = &facts->hosts[0];
  facts->subnet_count = 0;
  for (int i = 0; i < first->interface_count && facts->subnet_count < DOCTOR_SUBNETS; i++) {
    uint32_t netmask = first->interfaces[i].netmask;
    facts->subnets[facts->subnet_count] = (struct doctor_subnet){
        .network = first->interfaces[i].address & netmask, .netmask = netmask};
    facts->subnet_count += is_shared(facts, facts->subnet_count);
  }
}

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
  double there = 0, all = 0, part;
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *carrier = doctor_carrier(facts, h, &part);
    const struct doctor_interface *interface = doctor_interface_in(facts, h, subnet);
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
    int hosts = 0;
    for (int h = 0; h < facts->host_count; h++) {
      double part;
      const struct doctor_interface *carrier = doctor_carrier(facts, h, &part);
      const struct doctor_interface *there = doctor_interface_in(facts, h, s);
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
  for (int word = 0; word < DOCTOR_CPU_TEXT; word++)
    count += __builtin_popcountll(cpus[word]);
  return count;
}

int doctor_host_cpus(const struct doctor_facts *facts, int host) {
  uint64_t all[DOCTOR_CPU_TEXT] = {0};
  for (int r = 0; r < facts->rank_count; r++)
    for (int word = 0; facts->ranks[r].host == host && word < DOCTOR_CPU_TEXT; word++)
      all[word] |= facts->ranks[r].cpus[word];
  return doctor_cpu_count(all);
}
