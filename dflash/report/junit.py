"""A diagnosis as JUnit XML: a test case a failure mode, for the page that CI shows."""

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from dflash.diagnose.findings import Diagnosis, Finding
from dflash.report.diagnosis import finding_lines

CLASS = "dflash.failures"
INTERRUPTED = "not examined: the diagnosis was interrupted"


def junit_xml(diagnosis: Diagnosis) -> str:
    """Reproduced is a failure, inconclusive or not come to an error, not applicable a skip."""
    findings = diagnosis.findings
    counts = {
        "tests": len(findings) + len(diagnosis.missing),
        "failures": sum(_is_failure(finding) for finding in findings),
        "errors": sum(one.verdict == "inconclusive" for one in findings) + len(diagnosis.missing),
        "skipped": sum(finding.verdict == "not applicable" for finding in findings),
    }
    numbers = {name: str(count) for name, count in counts.items()}
    root = Element("testsuites")
    numbers |= {"name": "dflash diagnose", "time": f"{diagnosis.wall_s:.3f}"}
    suite = SubElement(root, "testsuite", numbers)
    properties = SubElement(suite, "properties")
    complete = "yes" if diagnosis.complete else "no: it was interrupted"
    facts = {"torch": diagnosis.torch, "level": diagnosis.level, "complete": complete}
    for name, value in facts.items():
        SubElement(properties, "property", name=name, value=value)
    for finding in findings:
        _case(suite, finding)
    for slug in diagnosis.missing:
        case = SubElement(suite, "testcase", classname=CLASS, name=slug, time="0.000")
        SubElement(case, "error", message=INTERRUPTED, type="interrupted")
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: Element, finding: Finding) -> None:
    case = SubElement(
        suite,
        "testcase",
        classname=CLASS,
        name=finding.slug,
        time=f"{finding.wall_s:.3f}",
    )
    message = f"{finding.verdict}: {finding.why}"
    text = "\n".join(finding_lines(finding))
    if finding.verdict == "not applicable":
        SubElement(case, "skipped", message=message)
    elif finding.verdict == "inconclusive":
        SubElement(case, "error", message=message, type="inconclusive").text = text
    elif _is_failure(finding):
        if finding.verdict != "reproduced":
            message = f"the remedy failed: {finding.remedy_why}"
        SubElement(case, "failure", message=message, type=finding.verdict).text = text
    else:
        SubElement(case, "system-out").text = text


def _is_failure(finding: Finding) -> bool:
    return finding.severity == "error" and finding.verdict != "inconclusive"
