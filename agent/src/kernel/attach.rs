//! Probes on the libraries of one process: attached, taken off, accounted for.

use std::{num::NonZeroU32, path::Path};

use aya::programs::{
    UProbe,
    uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeLinkId, UProbeScope},
};
use dislodge_ebpf::process::AttachCookie;

use super::{
    AttachError, Kernel,
    canary::ReturnProbes,
    outlook::{Manner, program_refused},
    plan::{Planned, ProbeReport, ProbeState, Site, Surveyed},
    probe::ProbeSet,
};
use crate::{event::ProcessKey, target::library::MappedLibrary};

/// A program that is attached to a function.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) program: &'static str,
    /// The one that its cookie names.
    pub(super) slot: u32,
    pub(super) id: UProbeLinkId,
}

impl Kernel {
    /// Puts the probes of `sets` that belong to a library on it, for one process only. Each row says what became of it;
    /// rows of other sets say that they are on demand.
    pub fn attach_library(
        &mut self,
        key: ProcessKey,
        surveyed: &Surveyed,
        sets: &[ProbeSet],
        returns: &ReturnProbes,
    ) -> Vec<ProbeReport> {
        let mut links = Vec::new();
        let rows = self.attach_sets(key, surveyed, sets, returns, &mut links);
        match self.traced.get_mut(&key) {
            Some(traced) => traced.links.append(&mut links),
            None => self.drop_links(key, links),
        }
        rows
    }

    pub(super) fn attach_sets(
        &mut self,
        key: ProcessKey,
        Surveyed { library, planned }: &Surveyed,
        sets: &[ProbeSet],
        returns: &ReturnProbes,
        links: &mut Vec<Link>,
    ) -> Vec<ProbeReport> {
        planned
            .iter()
            .map(|planned| {
                let spec = planned.spec();
                let state = match planned {
                    Planned::Missing(_) => ProbeState::Missing,
                    Planned::Unusable(_, why) => ProbeState::Refused { why: why.clone() },
                    Planned::At(site) if sets.contains(&spec.set) => {
                        self.attach_site(key, library, site, returns, links)
                    }
                    Planned::At(_) => ProbeState::OnDemand,
                };
                ProbeReport::of(spec, library.name.clone(), state)
            })
            .collect()
    }

    pub(super) fn drop_links(&mut self, key: ProcessKey, links: Vec<Link>) {
        let mut owned = Vec::with_capacity(links.len());
        for Link { program: name, slot, id } in links {
            let Some(program) = self.program(name) else { continue };
            match program.take_link(id) {
                Ok(link) => owned.push((slot, link)),
                Err(error) => tracing::warn!(pid = key.pid, program = name, %error, "cannot detach"),
            }
        }
        self.removal.begin(owned);
    }

    fn attach_site(
        &mut self,
        key: ProcessKey,
        library: &MappedLibrary,
        site: &Site,
        returns: &ReturnProbes,
        links: &mut Vec<Link>,
    ) -> ProbeState {
        let manner = site.spec.manner(returns);
        let mut site = site.clone();
        if matches!(manner, Manner::EntryOnly { .. }) {
            site.parameter |= AttachCookie::ENTRY_ONLY;
        }
        let attached = match manner {
            Manner::Refused { why } => Err(why.to_owned()),
            Manner::Whole | Manner::EntryOnly { .. } => {
                self.attach_programs(key, library, &site, links, site.spec.programs(manner))
            }
        };
        match (attached, manner) {
            (Err(why), _) => ProbeState::Refused { why },
            (Ok(()), Manner::EntryOnly { why }) => ProbeState::EntryOnly { why: why.to_owned() },
            (Ok(()), _) => ProbeState::Attached,
        }
    }

    fn attach_programs(
        &mut self,
        key: ProcessKey,
        library: &MappedLibrary,
        site: &Site,
        links: &mut Vec<Link>,
        programs: impl IntoIterator<Item = &'static str>,
    ) -> Result<(), String> {
        programs.into_iter().try_for_each(|program| self.attach_program(key, library, site, program, links))
    }

    fn attach_program(
        &mut self,
        key: ProcessKey,
        library: &MappedLibrary,
        site: &Site,
        program: &'static str,
        links: &mut Vec<Link>,
    ) -> Result<(), String> {
        if let Some(error) = self.not_loaded.get(program) {
            return Err(program_refused(error));
        }
        let slot = self.slot(key).map_err(|error| error.to_string())?;
        let cookie = AttachCookie { slot, parameter: site.parameter };
        let id = self
            .attach_uprobe(key, program, &library.path, site.file_offset, cookie)
            .map_err(|error| error.to_string())?;
        links.push(Link { program, slot, id });
        Ok(())
    }

    pub(super) fn attach_uprobe(
        &mut self,
        key: ProcessKey,
        name: &'static str,
        file: &Path,
        file_offset: u64,
        cookie: AttachCookie,
    ) -> Result<UProbeLinkId, AttachError> {
        let pid = NonZeroU32::new(key.pid).ok_or(AttachError::NoProcess)?;
        let point = UProbeAttachPoint {
            location: UProbeAttachLocation::AbsoluteOffset(file_offset),
            cookie: Some(cookie.to_bits()),
        };
        let program = self.program(name).ok_or(AttachError::Missing(name))?;
        Ok(program.attach(point, file, UProbeScope::OneProcess(pid))?)
    }

    pub(super) fn program(&mut self, name: &str) -> Option<&mut UProbe> {
        self.ebpf.program_mut(name)?.try_into().ok()
    }
}
