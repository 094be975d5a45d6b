/* Finds the subnets that all hosts share, and the fraction of the traffic that each subnet
 * carries. */
#include "tools/doctor/doctor.h"

bool doctor_is_in_network(const struct doctor_interface *one, uint32_t address, uint32_t netmask) {
  return one->netmask == netmask && ((one->address ^ address) & netmask) == 0;
}

const struct doctor_interface *doctor_find_interface(const struct doctor_facts *facts, int host,
                                                     int subnet) {
  const struct doctor_subnet *in = &facts->subnets[subnet];
  const struct doctor_host *the = &facts->hosts[host];
  for (int i = 0; i < the->interface_count; i++)
    if (the->interfaces[i].up &&
        doctor_is_in_network(&the->interfaces[i], in->network, in->netmask))
      return &the->interfaces[i];
  return NULL;
}

/* True if every host has a different address in the candidate's subnet. */
static bool is_shared_subnet(const struct doctor_facts *facts, int candidate) {
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *mine = doctor_find_interface(facts, h, candidate);
    for (int other = 0; mine && other < h; other++)
      if (doctor_find_interface(facts, other, candidate)->address == mine->address)
        return false;
    if (!mine)
      return false;
  }
  return true;
}

void doctor_find_subnets(struct doctor_facts *facts) {
  const struct doctor_host *first = &facts->hosts[0];
  facts->subnet_count = 0;
  for (int i = 0; i < first->interface_count && facts->subnet_count < DOCTOR_SUBNETS; i++) {
    const struct doctor_interface *one = &first->interfaces[i];
    facts->subnets[facts->subnet_count] =
        (struct doctor_subnet){.network = one->address & one->netmask, .netmask = one->netmask};
    facts->subnet_count += doctor_find_interface(facts, 0, facts->subnet_count) == one &&
                           is_shared_subnet(facts, facts->subnet_count);
  }
}

double doctor_traffic_part(const struct doctor_facts *facts, int host, int subnet) {
  double there = 0, all = 0;
  for (int h = 0; h < facts->host_count; h++) {
    uint64_t sent = 0;
    for (int i = 0; i < facts->hosts[h].interface_count; i++)
      sent += facts->hosts[h].interfaces[i].sent;
    if (facts->bulk == 0 || sent < facts->bulk / 2 || (host >= 0 && host != h))
      continue; /* the bulk transfer did not use the interfaces of a host that sent so little */
    all += (double)sent;
    there += (double)doctor_find_interface(facts, h, subnet)->sent;
  }
  return all > 0 ? there / all : 0;
}

int doctor_used_subnet(const struct doctor_facts *facts) {
  int best = -1;
  for (int s = 0; s < facts->subnet_count; s++)
    if (doctor_traffic_part(facts, -1, s) > (best < 0 ? 0 : doctor_traffic_part(facts, -1, best)))
      best = s;
  return best;
}

int doctor_fastest_subnet(const struct doctor_facts *facts) {
  int best = 0;
  for (int s = 1; s < facts->subnet_count; s++)
    best = facts->subnets[s].tcp > facts->subnets[best].tcp ? s : best;
  return best;
}
